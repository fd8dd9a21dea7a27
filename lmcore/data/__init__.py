"""Corpora (embedded, official downloads, any text) as token memmaps and batches."""
# ruff: noqa: F401

from typing import Any

from lmcore.data.corpora import CorpusConfig, EmbeddedCorpus, TextCorpus, open_corpus
from lmcore.data.downloads import download
from lmcore.data.grammar import entropy_per_document, log_probability, stories
from lmcore.data.prepared import PreparedData, is_prepared, open_data, open_or_prepare, prepare
from lmcore.data.tokenizers import load_gpt2, tokenizer_for

BATCHES = (
    "batch_at_step", "get_batch", "num_validation_windows", "num_windows_per_epoch", "part_of_batch", "prefetched",
    "require_context", "validation_batches",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """What makes batches, when it is first asked for: it imports PyTorch, and texts need none."""
    if name not in BATCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmcore.data import batches

    return getattr(batches, name)
