"""Corpora (embedded, official downloads, any text) as token memmaps; what needs PyTorch is in `batches`."""
# ruff: noqa: F401

from lmcore.data.corpora import CorpusConfig, EmbeddedCorpus, TextCorpus, open_corpus
from lmcore.data.prepared import PreparedData, is_prepared, open_data, open_or_prepare, prepare
from lmcore.data.tokenizers import load_gpt2, load_tokenizer
