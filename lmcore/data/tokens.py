"""Prepares a corpus once: tokenizes it in bulk into memmaps and writes down what they hold."""

import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock

from lmcore.data.corpora import Corpus, CorpusConfig, EmbeddedCorpus, open_corpus
from lmcore.data.documents import Piece
from lmcore.data.prepared import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TOKENIZER_FOLDER,
    PreparedData,
    bin_path,
    is_prepared,
    open_data,
)
from lmcore.data.specification import describe_tokenizer, tokenizer_for
from lmcore.data.story_grammar import entropy_per_document, floor_nats_per_token
from lmcore.errors import UserError, require
from lmcore.files import write_json
from lmcore.progress import Progress
from lmcore.tokenizer import Tokenizer

BATCH_CHARS = 1 << 22
"""Text that is encoded at a time: enough to keep all cores busy, little enough to fit anywhere."""


def prepare(
    source: str | os.PathLike,
    tokenizer: Tokenizer | str | os.PathLike,
    out_folder: str | os.PathLike,
    config: CorpusConfig | None = None,
    *,
    reuse: bool = True,
    progress: bool = True,
) -> PreparedData:
    """Tokenizes `source` (as in `open_corpus`) into `out_folder` and opens it (`open_data`).

    Every document is followed by `<|endoftext|>`, the last one too. `tokenizer` is a Tokenizer or a specification
    for `tokenizer_for`. The folder gets train.bin and valid.bin (ids in the smallest unsigned type that holds the
    vocabulary), tokenizer/ and, last of all, manifest.json. A folder that holds the same source and tokenizer already
    is reused; another prepared corpus there is replaced once the new one is complete. Raises `UserError`.
    """
    folder = Path(out_folder)
    corpus = open_corpus(source, config, progress=progress)
    request = {"source": corpus.describe(), "tokenizer": describe_tokenizer(tokenizer)}
    with writing_to(folder), FileLock(folder / ".lock"):
        if reuse and (data := open_if_same(folder, request)):
            say_if_validation_is_training_text(data)
            return data
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder) as temporary:
            new = Path(temporary)
            if isinstance(tokenizer, str | os.PathLike):
                tokenizer = tokenizer_for(tokenizer, corpus, work_folder=new)
            manifest = write_tokens(corpus, tokenizer, new, progress) | {"request": request}
            tokenizer.save(new / TOKENIZER_FOLDER)
            replace_prepared(new, folder, manifest)
        data = open_data(folder)
        say_if_validation_is_training_text(data)
        return data


def open_or_prepare(
    data: str | os.PathLike,
    tokenizer: Tokenizer | str | os.PathLike,
    out_folder: str | os.PathLike,
    config: CorpusConfig | None = None,
) -> PreparedData:
    """Opens `data` if it is a prepared folder, with the tokenizer that made it; else prepares it into `out_folder`."""
    if is_prepared(data):
        return open_data(data)
    return prepare(data, tokenizer, out_folder, config)


def open_if_same(folder: Path, request: dict[str, Any]) -> PreparedData | None:
    """The corpus in `folder` if it is the one that is asked for and all of it is intact."""
    try:
        data = open_data(folder)
        return data if data.manifest.get("request") == request and data.tokenizer else None
    except UserError:
        return None


def say_if_validation_is_training_text(data: PreparedData) -> None:
    """Prints a line where a loss on the validation text would measure what the model has learned by heart."""
    splits, source = data.manifest["splits"], data.manifest["request"]["source"]
    trained = {file["sha256"] for file in source.get("train_files", ())}
    files = [file["file"] for file in source.get("valid_files", ()) if file["sha256"] in trained]
    what = None
    if splits["train"]["sha256"] == splits["valid"]["sha256"]:
        what = "is the training text"
    elif files:
        what = f"({', '.join(files)}) is part of the training text"
    if what is not None:
        said = f"Warning: the validation text {what}, so the validation loss says nothing about other texts."
        print(f"{data.folder}: {said}", file=sys.stderr, flush=True)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Makes the folder; turns a failure to write there into a `UserError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror or error}; what was there is unchanged.") from error


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path, progress: bool = True) -> dict[str, Any]:
    """Writes both splits to `folder` and returns the manifest."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    totals: dict[str, TokenCounts] = {}
    for split in SPLITS:
        with open(bin_path(folder, split), "wb") as file:
            unit = "document" if isinstance(corpus, EmbeddedCorpus) else "byte"
            bar = Progress(corpus.size(split), f"encode {split}", unit) if progress else None
            totals[split] = encode_to(file, corpus.documents(split, Meter(bar) if bar else None), tokenizer, dtype)
            file.flush()
            os.fsync(file.fileno())
            if bar:
                bar.close()
        require(
            totals[split].bytes > 0, f"The {split} split of {corpus.describe()['name']} has no text; use a longer one."
        )
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "splits": {split: counts.describe() for split, counts in totals.items()},
    }
    if isinstance(corpus, EmbeddedCorpus):
        manifest["grammar"] = describe_grammar(corpus, totals)
    return manifest


class Meter:
    """Adds up what has been read and shows it."""

    def __init__(self, bar: Progress):
        self.bar, self.done = bar, 0

    def __call__(self, count: int) -> None:
        """`count` more units have been read."""
        self.done += count
        self.bar.update(self.done)


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


@dataclass
class TokenCounts:
    """What has been written to a split."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the documents, without anything between them."""
    min_id: int = 2**63
    max_id: int = -1
    squared_lengths: int = 0
    """Sum over the documents of their squared number of tokens, for the standard error of the mean."""
    digest: Any = field(default_factory=hashlib.sha256)

    @property
    def tokens_per_document(self) -> float:
        """Mean length of a document with its `<|endoftext|>`."""
        return self.tokens / self.documents

    @property
    def standard_error(self) -> float:
        """Standard error of `tokens_per_document` as an estimate of the expectation."""
        variance = self.squared_lengths / self.documents - self.tokens_per_document**2
        return math.sqrt(max(variance, 0.0) / max(self.documents - 1, 1))

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the split."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "bytes_per_token": self.bytes / self.tokens,
            "tokens_per_document": self.tokens_per_document,
            "tokens_per_document_standard_error": self.standard_error,
            "min_id": self.min_id,
            "max_id": self.max_id,
            "sha256": self.digest.hexdigest(),
        }


def encode_to(file: BinaryIO, pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> TokenCounts:
    """Writes the ids of all pieces, with `<|endoftext|>` after each document, and counts."""
    counts = TokenCounts()
    length = 0  # tokens so far of a document that comes in several pieces
    for batch in batches_of(pieces):
        encoded = tokenizer.encode_documents([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            length += len(ids)
            if piece.ends_document:
                ids.append(tokenizer.eot_id)
                counts.documents += 1
                counts.squared_lengths += (length + 1) ** 2
                length = 0
        if not any(encoded):
            continue
        ids = np.fromiter(chain.from_iterable(encoded), dtype=np.int64)
        require(
            ids.min() >= 0 and ids.max() < tokenizer.vocab_size,
            f"The tokenizer gives ids from {ids.min()} to {ids.max()}, outside its vocabulary of "
            f"{tokenizer.vocab_size}.",
        )
        counts.tokens += len(ids)
        counts.bytes += sum(len(piece.text.encode()) for piece in batch)
        counts.min_id = min(counts.min_id, int(ids.min()))
        counts.max_id = max(counts.max_id, int(ids.max()))
        data = ids.astype(dtype).tobytes()
        counts.digest.update(data)
        file.write(data)
    return counts


def batches_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces into lists of about `BATCH_CHARS` characters."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def describe_grammar(corpus: EmbeddedCorpus, totals: dict[str, TokenCounts]) -> dict[str, float]:
    """The floor of the loss: of the grammar, by the mean length of the training stories, and of the validation text.

    The second is what the grammar itself, the best of models, scores on exactly these validation stories.
    """
    train, valid = totals["train"], totals["valid"]
    floor = floor_nats_per_token(train.tokens_per_document)
    return {
        "seed": corpus.seed,
        "entropy_per_document": entropy_per_document(),
        "tokens_per_document": train.tokens_per_document,
        "tokens_per_document_standard_error": train.standard_error,
        "floor_nats_per_token": floor,
        "floor_standard_error": floor * train.standard_error / train.tokens_per_document,
        "valid_floor_nats_per_token": -corpus.log_probability("valid") / valid.tokens,
    }


def replace_prepared(new: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Moves the files of `new` into `folder`; without its manifest, which comes last, a folder is not prepared."""
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
    for path in (new / TOKENIZER_FOLDER).iterdir():
        os.replace(path, folder / TOKENIZER_FOLDER / path.name)
    for split in SPLITS:
        os.replace(bin_path(new, split), bin_path(folder, split))
    write_json(folder / MANIFEST, manifest)
