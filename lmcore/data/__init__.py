"""Corpora (embedded, official downloads, any text) as token memmaps and batches."""
# ruff: noqa: F401

from lmcore.data.batches import (
    batch_at_step,
    get_batch,
    num_validation_windows,
    num_windows_per_epoch,
    prefetched,
    require_context,
    validation_batches,
)
from lmcore.data.corpora import CorpusConfig, EmbeddedCorpus, TextCorpus, open_corpus
from lmcore.data.downloads import download
from lmcore.data.grammar import entropy_per_document, floor_nats_per_token, log_probability, stories, story_text
from lmcore.data.prepared import PreparedData, is_prepared, open_data, open_or_prepare, prepare
from lmcore.data.tokenizers import load_gpt2, tokenizer_for
