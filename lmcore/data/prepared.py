"""Prepared corpora: token memmaps beside a manifest that says what is in them, opened only if that is true.

The first half opens them, which every run does; the second half makes them, once.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm

from lmcore.data.corpora import Corpus, CorpusConfig, EmbeddedCorpus, open_corpus
from lmcore.data.tokenizers import load_tokenizer, tokenizer_for
from lmcore.errors import UserError, require
from lmcore.files import checksummed, locked, not_a_pipe, read_json, sha256_file, temporary_folder, verified, write_json
from lmcore.tokenizer import Tokenizer

StrPath = str | os.PathLike

FORMAT_VERSION = 1
SPLITS = ("train", "valid")
MANIFEST = "manifest.json"
CHECKED = "checked.json"
AGAIN = "run `lmcore data prepare` again."
TOKENIZER_FOLDER = "tokenizer"
DEV_FRACTION, DEV_DOCUMENTS = 0.02, 15
"""Share of the training documents, the last ones, on which settings are chosen; no fewer than `DEV_DOCUMENTS`, unless
these were more than a tenth of all."""
SCANNED = 1 << 20
"""Tokens at the end of the training data in which `dev` is looked for first."""
BATCH_DOCUMENTS = 256
"""Documents that are encoded at a time, on all cores."""


@dataclass(frozen=True)
class PreparedData:
    """A prepared corpus: `train` and `valid` are read-only memmaps of token ids."""

    folder: Path
    manifest: dict[str, Any]
    train: np.memmap
    valid: np.memmap

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, loaded on first use. Raises `UserError` if it is missing or another one."""
        tokenizer = Tokenizer.load(folder := self.folder / TOKENIZER_FOLDER)
        same = tokenizer.fingerprint == self.manifest["tokenizer_fingerprint"]
        require(same, f"The tokenizer in {folder} is not the one that made the tokens; {AGAIN}")
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
        few = f"{self.folder} has {documents} training document, and dev, on which settings are chosen, needs another."
        require(documents > self.dev_documents, few)
        start = len(self.train)
        ends = np.empty(0, int)
        while len(ends) <= self.dev_documents:  # from the last document backwards
            start = max(0, start - max(SCANNED, len(self.train) - start))
            ends = start + np.flatnonzero(self.train[start:] == self.tokenizer.eot_id)
        return int(ends[-1 - self.dev_documents]) + 1

    def evaluated_on(self, split: str) -> "PreparedData":
        """The same corpus, evaluated on `split`; with "dev" training stops where `dev` begins."""
        if split == "valid":
            return self
        return replace(self, train=self.train[: self.dev_start], valid=self.train[self.dev_start :])

    @property
    def floor_nats_per_token(self) -> float | None:
        """Lowest expected loss of any model on this corpus, known for the embedded corpus alone."""
        train, entropy = self.manifest["splits"]["train"], self.manifest.get("entropy_per_document")
        return entropy and entropy * train["documents"] / train["tokens"]


def is_prepared(folder: StrPath) -> bool:
    """Whether `folder` is a prepared corpus, as its manifest says."""
    return (Path(folder) / MANIFEST).exists()


def open_data(folder: StrPath) -> PreparedData:
    """Opens a folder that `prepare` has made.

    The manifest's checksum and the sizes of the files are checked each time. The checksums of the files are checked
    once, and again only when a file has changed since (size or times). Raises `UserError`, naming the file and what is
    wrong with it.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    arrays = {split: map_tokens(folder, manifest, split) for split in SPLITS}
    checked, states = None, file_states(folder, manifest)
    with suppress(UserError):
        checked = read_json(folder / CHECKED)
    if checked != states:
        for split in SPLITS:
            path, same = bin_path(folder, split), manifest["splits"][split]["sha256"]
            changed = f"{path} has changed since it was prepared (its checksum is not the one in {MANIFEST}); {AGAIN}"
            require(sha256_file(path) == same, changed)
        with suppress(UserError):  # where the folder is not ours to write, the next opening reads them again
            write_json(folder / CHECKED, states)
    return PreparedData(folder, manifest, arrays["train"], arrays["valid"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises `UserError` if there is none, of another version, or changed."""
    require(is_prepared(folder), f"{folder} is not a prepared corpus; make one with `lmcore data prepare`.")
    manifest = read_json(folder / MANIFEST)
    content = verified(manifest) if isinstance(manifest, dict) else None
    if content is None or content.get("format_version") != FORMAT_VERSION:
        what = f"{folder / MANIFEST} is of another version of lmcore, or has changed since it was written"
        raise UserError(f"{what} (by its checksum); {AGAIN}")
    return content


def bin_path(folder: Path, split: str) -> Path:
    """The file of a split's ids."""
    return folder / f"{split}.bin"


def map_tokens(folder: Path, manifest: dict[str, Any], split: str) -> np.memmap:
    """The ids of a split as a read-only memmap, if the file is as long as the manifest says."""
    path, tokens = not_a_pipe(bin_path(folder, split)), manifest["splits"][split]["tokens"]
    size, dtype = path.stat().st_size if path.is_file() else 0, np.dtype(manifest["dtype"])
    whole = size == tokens * dtype.itemsize
    require(whole, f"{path} does not hold the {tokens:,} tokens of {dtype.name} that {MANIFEST} says; {AGAIN}")
    return np.memmap(path, dtype=dtype, mode="r")


def file_states(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What a later opening compares: the checksums that hold for the files, which files they are, sizes and times.

    A program can set the time of the last write, but not that of the last change (ctime).
    """
    stats = {split: bin_path(folder, split).stat() for split in SPLITS}
    states = {split: [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for split, s in stats.items()}
    return {split: [manifest["splits"][split]["sha256"], *states[split]] for split in SPLITS}


# Making them


def prepare(
    source: StrPath,
    tokenizer: Tokenizer | StrPath,
    out_folder: StrPath | None = None,
    config: CorpusConfig | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """Tokenizes `source` (as in `open_corpus`) into `out_folder` and opens it (`open_data`).

    Without `out_folder` it goes to a folder in data/ whose name tells texts and tokenizers apart.

    Every document is followed by `<|endoftext|>`, the last one too. `tokenizer` is a Tokenizer or a specification
    for `tokenizer_for`. The folder gets train.bin and valid.bin (ids in the smallest unsigned type that holds the
    vocabulary), tokenizer/ and, last of all, manifest.json with a checksum of its content. A folder that holds the same
    source and tokenizer already is reused; another prepared corpus there is replaced once the new one is complete.
    Raises `UserError`.
    """
    later = tokenizer == "gpt2" or str(tokenizer).startswith("bpe:")  # downloaded or trained only if it is needed
    if not isinstance(tokenizer, Tokenizer) and not later:
        tokenizer = load_tokenizer(tokenizer)
    corpus = open_corpus(source, config, progress=progress)
    named = tokenizer.fingerprint if isinstance(tokenizer, Tokenizer) else str(tokenizer)
    request = {"source": corpus.describe(), "tokenizer": named}
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    folder = Path(out_folder or f"data/{short_name(source)}-{digest[:8]}")
    taken = folder / TOKENIZER_FOLDER
    ours = not taken.exists() or (folder / MANIFEST).exists() or bin_path(folder, "train").exists()
    require(ours, f"{taken} is of no corpus and would be replaced: choose another folder.")
    data = open_if_same(folder, request)
    if data is None:
        try:
            with locked(folder / ".lock", "", -1), temporary_folder(".preparing-", folder) as new:
                data = open_if_same(folder, request)  # another process may have made it meanwhile
                if data is None:
                    if not isinstance(tokenizer, Tokenizer):
                        tokenizer = tokenizer_for(tokenizer, corpus, new)
                    manifest = write_tokens(corpus, tokenizer, new, progress) | {"request": request}
                    tokenizer.save(new / TOKENIZER_FOLDER)
                    write_json(new / MANIFEST, checksummed(manifest))
                    replace_prepared(new, folder)
                    data = open_data(folder)
        except OSError as error:
            raise UserError(f"Cannot write {folder}: {error.strerror or error}.") from error
    warn_of_texts(data)
    return data


def open_or_prepare(
    data: StrPath, tokenizer: Tokenizer | StrPath, out_folder: StrPath, config: CorpusConfig | None = None
) -> PreparedData:
    """Opens `data` if it is a prepared folder, with the tokenizer that made it; else prepares it into `out_folder`."""
    return open_data(data) if is_prepared(data) else prepare(data, tokenizer, out_folder, config)


def short_name(source: StrPath) -> str:
    """A name for what is made of a source: letters and digits of the last part of its path."""
    return "-".join(re.findall(r"\w+", Path(source).name)) or "text"


def open_if_same(folder: Path, request: dict[str, Any]) -> PreparedData | None:
    """The corpus in `folder` if it is the one that is asked for and all of it is intact."""
    try:
        data = open_data(folder)
        return data if data.manifest.get("request") == request and data.tokenizer else None
    except UserError:
        return None


def replace_prepared(new: Path, folder: Path) -> None:
    """Moves a corpus from `new` to `folder`, in place of one that is there.

    Its manifest goes first and comes last: a folder without one is not prepared, and is prepared again.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder / TOKENIZER_FOLDER, ignore_errors=True)
    for name in (*(bin_path(new, split).name for split in SPLITS), TOKENIZER_FOLDER, MANIFEST):
        (new / name).rename(folder / name)


def warn_of_texts(data: PreparedData) -> None:
    """Warns where a loss on the validation text would measure what the model has memorized, and of skipped records."""

    def say(sentence: str) -> None:
        print(f"{data.folder}: {sentence}", file=sys.stderr, flush=True)

    source = data.manifest["request"]["source"]
    trained, held_out = ({file["sha256"] for file in source.get(f"{split}_files", ())} for split in SPLITS)
    if trained & held_out:
        say("Warning: the validation text is training text, so its loss says nothing about other texts.")
    for file, faulty in data.manifest.get("skipped", {}).items():
        say(f"{file}{faulty}.")


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path, progress: bool = True) -> dict[str, Any]:
    """Writes both splits to `folder` and returns the manifest."""
    dtype, splits = smallest_dtype(tokenizer.vocab_size), {}
    for split in SPLITS:
        with open(bin_path(folder, split), "wb") as file:
            texts = tqdm(corpus.documents(split), f"encode {split}", unit=" documents", disable=not progress or None)
            splits[split] = encode_to(file, texts, tokenizer, dtype)
            file.flush()
            os.fsync(file.fileno())
        require(splits[split]["bytes"] > 0, f"The {split} split of {corpus.name} has no text; use a longer one.")
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "splits": splits,
    }
    if isinstance(corpus, EmbeddedCorpus):
        from lmcore.data.grammar import entropy_per_document

        return manifest | {"entropy_per_document": entropy_per_document()}
    return manifest | {"skipped": {path.name: said for path, said in corpus.skipped.items()}}


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


def encode_to(file: BinaryIO, documents: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, Any]:
    """Writes the ids of all documents, with `<|endoftext|>` after each.

    Returns what the manifest says of them: tokens, documents, UTF-8 bytes of the documents, checksum of the ids.
    """
    counts, digest, documents = Counter(tokens=0, documents=0, bytes=0), hashlib.sha256(), iter(documents)
    while texts := list(islice(documents, BATCH_DOCUMENTS)):
        for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
            ids.append(tokenizer.eot_id)
            data = np.array(ids, dtype).tobytes()
            file.write(data)
            digest.update(data)
            counts.update(tokens=len(ids), documents=1, bytes=len(text.encode()))
    return {**counts, "sha256": digest.hexdigest()}
