"""Corpora (embedded, official downloads, any text) as token memmaps and batches."""
# ruff: noqa: F401

from importlib import import_module
from typing import Any

from lmcore.data.corpora import CorpusConfig, EmbeddedCorpus, TextCorpus, open_corpus
from lmcore.data.downloads import download
from lmcore.data.prepared import PreparedData, is_prepared, open_data, open_or_prepare, prepare
from lmcore.data.tokenizers import load_gpt2, tokenizer_for

LATER = {
    "batches": (
        "batch_at_step", "get_batch", "num_validation_windows", "num_windows_per_epoch", "part_of_batch", "prefetched",
        "require_context", "validation_batches",
    ),
    "grammar": ("entropy_per_document", "log_probability", "stories"),
}  # fmt: skip
"""By module, what is imported when it is first asked for: PyTorch, which texts do not need; stories."""


def __getattr__(name: str) -> Any:
    for module, names in LATER.items():
        if name in names:
            return getattr(import_module(f"lmcore.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
