"""Prepared corpora: token memmaps beside a manifest that says what is in them, opened only if that is true.

The first half opens them, which every run does; the second half makes them, once.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmcore.data.corpora import Corpus, CorpusConfig, EmbeddedCorpus, Piece, open_corpus
from lmcore.data.downloads import describe_wikitext
from lmcore.data.grammar import entropy_per_document, floor_nats_per_token
from lmcore.data.tokenizers import describe_tokenizer, tokenizer_for
from lmcore.errors import UserError, require
from lmcore.files import locked, read_json, temporary_folder, write_json
from lmcore.progress import Progress
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "valid")
MANIFEST = "manifest.json"
CHECKED = "checked.json"
TOKENIZER_FOLDER = "tokenizer"
DEV_FRACTION, DEV_DOCUMENTS = 0.02, 15
"""Share of the training documents, the last ones, on which settings are chosen; no fewer than `DEV_DOCUMENTS`, unless
these were more than a tenth of all."""
SCAN_BYTES = 1 << 22
BATCH_CHARS = 1 << 22
"""Text that is encoded at a time: enough to keep all cores busy, little enough to fit anywhere."""


@dataclass(frozen=True)
class PreparedData:
    """A prepared corpus: `train` and `valid` are read-only memmaps of token ids."""

    folder: Path
    manifest: dict[str, Any]
    train: np.memmap
    valid: np.memmap
    opened: dict[str, Any]
    """`file_states` when it was opened."""

    def require_unchanged(self) -> None:
        """Raises `UserError` if the ids were overwritten since they were opened.

        Another corpus that was prepared in the same folder since then has files of its own: that does no harm.
        """
        with suppress(OSError):  # removed: what is mapped stays
            for split, (inode, *before) in self.opened.items():
                now_inode, *now = file_states(self.folder, self.manifest)[split]
                if inode == now_inode and before != now:
                    check_tokens(map_tokens(self.folder, self.manifest, split), self.manifest, split)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, loaded on first use. Raises `UserError` if it is missing or another one."""
        folder = self.folder / TOKENIZER_FOLDER
        require(folder.is_dir(), f"The tokenizer folder {folder} is missing; run `lmcore data prepare` again.")
        tokenizer = Tokenizer.load(folder)
        require(
            tokenizer.fingerprint == self.manifest["tokenizer_fingerprint"],
            f"The tokenizer in {folder} is not the one that made the tokens; run `lmcore data prepare` again.",
        )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary; every id is below it."""
        return self.manifest["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids: their bytes, their type and the tokenizer; not paths or times."""
        names = ("format_version", "dtype", "vocab_size", "tokenizer_fingerprint")
        content = {name: self.manifest[name] for name in names}
        content |= {split: self.manifest["splits"][split]["sha256"] for split in SPLITS}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def dev_documents(self) -> int:
        """How many of the training documents are `dev`."""
        documents = self.manifest["splits"]["train"]["documents"]
        return max(1, round(DEV_FRACTION * documents), min(DEV_DOCUMENTS, documents // 10))

    @cached_property
    def dev_start(self) -> int:
        """Where `dev`, the last `dev_documents` of the training documents, begins in `train`.

        Raises `UserError` if there are too few documents.
        """
        documents = self.manifest["splits"]["train"]["documents"]
        held_out, after, step = self.dev_documents, len(self.train), SCAN_BYTES // 8
        require(
            documents > held_out,
            f"{self.folder} has {documents} training document, and dev, on which settings are chosen, needs another.",
        )
        left = held_out + 1  # ends of documents, counted from the last one backwards
        while left > 0 and after > 0:
            before = max(0, after - step)
            ends = np.flatnonzero(self.train[before:after] == self.tokenizer.eot_id)
            if len(ends) >= left:
                return before + int(ends[-left]) + 1
            left, after = left - len(ends), before
        raise UserError(f"{self.folder} has fewer training documents than its {MANIFEST} says; prepare it again.")

    def evaluated_on(self, split: str) -> "PreparedData":
        """The same corpus, evaluated on `split`; with "dev" training stops where `dev` begins."""
        if split == "valid":
            return self
        return replace(self, train=self.train[: self.dev_start], valid=self.train[self.dev_start :])

    @property
    def floor_nats_per_token(self) -> float | None:
        """Lowest expected loss of any model on this corpus, known for the embedded corpus alone."""
        grammar = self.manifest.get("grammar")
        return grammar and grammar["floor_nats_per_token"]


def is_prepared(folder: str | os.PathLike) -> bool:
    """Whether `folder` is a prepared corpus, as its manifest says."""
    return (Path(folder) / MANIFEST).is_file()


def open_data(folder: str | os.PathLike, *, verify: bool = False) -> PreparedData:
    """Opens a folder that `prepare` has made.

    Sizes are held against the manifest each time. Checksums, ids and numbers of documents are checked by reading the
    files once in pieces, and again only when a file has changed since (size or times) or with `verify=True`, which
    checks the tokenizer as well. Raises `UserError`, naming the file and what is wrong with it.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    arrays = {split: map_tokens(folder, manifest, split) for split in SPLITS}
    checked = None
    with suppress(UserError):
        checked = read_json(folder / CHECKED)
    states = file_states(folder, manifest)
    if verify or checked != states:
        for split, array in arrays.items():
            check_tokens(array, manifest, split)
        with suppress(UserError):  # where the folder is not ours to write, the next opening reads them again
            write_json(folder / CHECKED, states)
    data = PreparedData(folder, manifest, arrays["train"], arrays["valid"], states)
    if verify:
        ends = data.tokenizer.eot_id == arrays["train"][-1] == arrays["valid"][-1]
        require(ends, f"The splits in {folder} do not end with {END_OF_TEXT}; run `lmcore data prepare` again.")
    return data


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises `UserError` if there is none, or of another version or form."""
    path = folder / MANIFEST
    require(
        path.is_file(),
        f"{folder} is not a prepared corpus (it has no {MANIFEST}); make one with `lmcore data prepare`.",
    )
    manifest = read_json(path)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    require(
        version == FORMAT_VERSION,
        f"{path} has format version {version}, but this lmcore reads {FORMAT_VERSION}; run "
        "`lmcore data prepare` again.",
    )
    try:
        splits = [manifest["splits"][split] for split in SPLITS]
        counts = [manifest["vocab_size"], *(split[key] for split in splits for key in ("tokens", "documents", "bytes"))]
        digests = [manifest["tokenizer_fingerprint"], *(split["sha256"] for split in splits)]
        complete = np.issubdtype(np.dtype(manifest["dtype"]), np.integer)
        complete &= all(isinstance(count, int) and count > 0 for count in counts)
        complete &= all(isinstance(digest, str) for digest in digests)
    except (KeyError, TypeError):
        complete = False
    require(complete, f"{path} is not a whole manifest; run `lmcore data prepare` again.")
    return manifest


def map_tokens(folder: Path, manifest: dict[str, Any], split: str) -> np.memmap:
    """The ids of a split as a read-only memmap, if the file is as long as the manifest says."""
    path, dtype, tokens = bin_path(folder, split), np.dtype(manifest["dtype"]), manifest["splits"][split]["tokens"]
    require(path.is_file(), f"{path} is missing; run `lmcore data prepare` again.")
    size = path.stat().st_size
    require(
        size == tokens * dtype.itemsize,
        f"{path} has {size:,} bytes, but {MANIFEST} says {tokens:,} tokens of {dtype.name} "
        f"({tokens * dtype.itemsize:,} bytes); run `lmcore data prepare` again.",
    )
    return np.memmap(path, dtype=dtype, mode="r")


def check_tokens(ids: np.memmap, manifest: dict[str, Any], split: str) -> None:
    """Reads all ids in pieces: none may be out of the vocabulary, checksum and documents must be the manifest's.

    The last id ends the last document, and so it ends each of them.
    """
    digest, documents, noted = hashlib.sha256(), 0, manifest["splits"][split]
    step = SCAN_BYTES // ids.itemsize
    for first in range(0, len(ids), step):
        piece = ids[first : first + step]
        smallest, largest = int(piece.min()), int(piece.max())
        wrong = smallest if smallest < 0 else largest
        require(
            0 <= wrong < manifest["vocab_size"],
            f"{ids.filename} holds the token id {wrong:,}, but the vocabulary has {manifest['vocab_size']:,} entries; "
            "run `lmcore data prepare` again.",
        )
        digest.update(piece)
        documents += int(np.count_nonzero(piece == ids[-1]))
    require(
        digest.hexdigest() == noted["sha256"],
        f"{ids.filename} has changed since it was prepared (its checksum is not the one in {MANIFEST}); run "
        "`lmcore data prepare` again.",
    )
    require(
        documents == noted["documents"],
        f"{ids.filename} holds {documents:,} documents, but {MANIFEST} says {noted['documents']:,}; run "
        "`lmcore data prepare` again.",
    )


def bin_path(folder: Path, split: str) -> Path:
    """The file of a split's ids."""
    return folder / f"{split}.bin"


def file_states(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What a later opening compares: which files they are, their sizes and times, and what is expected in them.

    A program can set the time of the last write, but not that of the last change (ctime).
    """
    states = {}
    for split in SPLITS:
        stat, noted = bin_path(folder, split).stat(), manifest["splits"][split]
        expected = [noted["sha256"], noted["documents"], manifest["vocab_size"]]
        states[split] = [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, *expected]
    return states


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
    if reuse and not os.access(folder, os.W_OK) and (data := open_if_same(folder, request)):  # shared, to be read only
        warn_of_texts(data)
        return data
    with writing_to(folder), locked(folder / ".lock", "", -1), temporary_folder(".preparing-", folder) as new:
        if reuse and (data := open_if_same(folder, request)):
            warn_of_texts(data)
            return data
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = tokenizer_for(tokenizer, corpus, work_folder=new)
        manifest = write_tokens(corpus, tokenizer, new, progress) | {"request": request}
        tokenizer.save(new / TOKENIZER_FOLDER)
        write_json(new / MANIFEST, manifest)
        replace_prepared(new, folder)
        data = open_data(folder)
        warn_of_texts(data)
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


def warn_of_texts(data: PreparedData) -> None:
    """Prints a line where a loss on the validation text would measure what the model has memorized, and one for each
    text in WikiText's form that is not WikiText-103's."""
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
    for split, found in data.manifest.get("wikitext", {}).items():
        if not found["is"].startswith("WikiText-103's"):
            counts = f"{found['words']:,} words with ends of lines, {found['unknown']:.1%} <unk>"
            print(f"{data.folder}: {split} is {found['is']} ({counts}).", file=sys.stderr, flush=True)


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
    embedded = isinstance(corpus, EmbeddedCorpus)
    totals: dict[str, TokenCounts] = {}
    for split in SPLITS:
        meter = Meter(corpus.size(split), f"encode {split}", "document" if embedded else "byte") if progress else None
        with open(bin_path(folder, split), "wb") as file:
            totals[split] = encode_to(file, corpus.documents(split, meter), tokenizer, dtype)
            file.flush()
            os.fsync(file.fileno())
        if meter:
            meter.close()
        said = f"The {split} split of {corpus.describe()['name']} has no text; use a longer one."
        require(totals[split].bytes > 0, said)
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "splits": {split: counts.describe() for split, counts in totals.items()},
    }
    if isinstance(corpus, EmbeddedCorpus):
        manifest["grammar"] = describe_grammar(corpus, totals)
    else:
        files = {"train": corpus.train_files + corpus.extra_train, "valid": corpus.valid_files}
        texts = {split: describe_wikitext(paths) for split, paths in files.items() if paths}
        manifest |= {"wikitext": found} if (found := {k: v for k, v in texts.items() if v}) else {}
    return manifest


class Meter(Progress):
    """Progress that is told how much more has been read."""

    done = 0

    def __call__(self, count: int) -> None:
        """`count` more units have been read."""
        self.done += count
        self.update(self.done)


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
        low, high = int(ids.min()), int(ids.max())
        said = f"The tokenizer gives ids from {low} to {high}, outside its vocabulary of {tokenizer.vocab_size}."
        require(low >= 0 and high < tokenizer.vocab_size, said)
        counts.tokens += len(ids)
        counts.bytes += sum(len(piece.text.encode()) for piece in batch)
        counts.min_id, counts.max_id = min(counts.min_id, low), max(counts.max_id, high)
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


def replace_prepared(new: Path, folder: Path) -> None:
    """Moves a corpus from `new`, a folder in `folder`, to its place; the one there stands again if that fails.

    Without its manifest, which goes first and comes last, a folder is not prepared.
    """
    names = [bin_path(new, split).name for split in SPLITS]
    names += [f"{TOKENIZER_FOLDER}/{path.name}" for path in (new / TOKENIZER_FOLDER).iterdir()]
    kept = new / "replaced"
    (kept / TOKENIZER_FOLDER).mkdir(parents=True)
    moves = [(folder / name, kept / name) for name in (MANIFEST, *names) if (folder / name).exists()]
    moves += [(new / name, folder / name) for name in (*names, MANIFEST)]
    done: list[tuple[Path, Path]] = []
    try:
        (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        for source, target in moves:
            os.rename(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.rename(target, source)
        raise
