"""Corpora (embedded, official downloads, any text) as token memmaps and batches."""

from lmcore.data.batches import (
    batch_at_step,
    get_batch,
    num_validation_windows,
    num_windows_per_epoch,
    require_context,
    validation_batches,
)
from lmcore.data.corpora import CorpusConfig, EmbeddedCorpus, TextCorpus, open_corpus
from lmcore.data.downloads import download
from lmcore.data.prefetch import prefetched
from lmcore.data.prepared import PreparedData, is_prepared, open_data
from lmcore.data.specification import tokenizer_for
from lmcore.data.story_grammar import (
    entropy_per_document,
    floor_nats_per_token,
    log_probability,
    stories,
    story_text,
)
from lmcore.data.tokens import open_or_prepare, prepare
from lmcore.text import END_OF_TEXT

__all__ = [
    "END_OF_TEXT",
    "CorpusConfig",
    "EmbeddedCorpus",
    "PreparedData",
    "TextCorpus",
    "batch_at_step",
    "download",
    "entropy_per_document",
    "floor_nats_per_token",
    "get_batch",
    "is_prepared",
    "log_probability",
    "num_validation_windows",
    "num_windows_per_epoch",
    "open_corpus",
    "open_data",
    "open_or_prepare",
    "prefetched",
    "prepare",
    "require_context",
    "stories",
    "story_text",
    "tokenizer_for",
    "validation_batches",
]
