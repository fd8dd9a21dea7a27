"""From the name of a source, or a path, to its training and validation documents."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lmcore.data.documents import Piece, read_documents, safe_cut
from lmcore.data.downloads import SOURCES, download
from lmcore.data.story_grammar import sample_stories, stories
from lmcore.errors import UserError, require, require_path
from lmcore.files import sha256_file

TEXT_SUFFIXES = (".txt", ".text", ".md")
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val")}
OnRead = Callable[[int], None]


@dataclass(frozen=True)
class CorpusConfig:
    """How a source becomes training and validation documents."""

    valid: str | None = None
    """File of validation documents, for a source that is one file or a folder without one."""
    valid_fraction: float = 0.1
    """Share of the documents, the last ones, held out when there is no validation file."""
    extra_train: tuple[str, ...] = ()
    """More files of training documents."""
    seed: int = 0
    """Seed of the embedded stories."""
    num_documents: int = 20_000
    """Training documents of the embedded corpus; `valid_fraction` times as many more are its validation split."""
    download_folder: str = "data/downloads"
    mirror: str | None = None
    """Address whose scheme and host replace those of the official downloads."""

    def __post_init__(self):
        require(0 < self.valid_fraction < 1, f"valid_fraction must be between 0 and 1, not {self.valid_fraction}.")
        for name in ("valid", "extra_train", "download_folder"):
            value = getattr(self, name)
            for path in (value,) if isinstance(value, str) else value or ():
                require_path(name, path)
        require(self.num_documents > 0, f"num_documents must be positive, not {self.num_documents}.")


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Stories of `lmcore.data.story_grammar`; the splits are independent streams of one seed."""

    seed: int = 0
    num_documents: int = 20_000
    valid_fraction: float = 0.1

    def count(self, split: str) -> int:
        """Number of documents of a split."""
        return self.num_documents if split == "train" else max(1, round(self.num_documents * self.valid_fraction))

    def size(self, split: str) -> int:
        """What the calls of `on_read` in `documents` add up to: the documents of the split."""
        return self.count(split)

    def documents(self, split: str, on_read: OnRead | None = None) -> Iterator[Piece]:
        """The documents of the split `train` or `valid`."""
        for story in islice(stories(self.seed, split), self.count(split)):
            if on_read is not None:
                on_read(1)
            yield Piece(story, True)

    def log_probability(self, split: str) -> float:
        """Natural logarithm of the probability that the grammar gives to all documents of the split."""
        return sum(log_p for _, log_p in islice(sample_stories(self.seed, split), self.count(split)))

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""
        return {
            "name": "embedded",
            "seed": self.seed,
            "num_documents": self.num_documents,
            "valid_fraction": self.valid_fraction,
        }


@dataclass(frozen=True)
class TextCorpus:
    """Documents of text files; without validation files, the last `valid_fraction` of the documents are held out."""

    name: str
    train_files: tuple[Path, ...]
    valid_files: tuple[Path, ...] = ()
    valid_fraction: float = 0.1
    extra_train: tuple[Path, ...] = field(default=())

    def __post_init__(self):
        for path in self.train_files + self.valid_files + self.extra_train:
            require(path.is_file(), f"There is no file {path}.")

    def size(self, split: str) -> int:
        """Bytes on disk that `documents` reads for the split; its calls of `on_read` add up to this."""
        if split == "valid" and self.valid_files:
            return total_bytes(self.valid_files)
        return total_bytes(self.train_files) + (total_bytes(self.extra_train) if split == "train" else 0)

    def documents(self, split: str, on_read: OnRead | None = None) -> Iterator[Piece]:
        """The documents of the split `train` or `valid`, streamed from the files."""
        if split == "valid" and self.valid_files:
            return read_documents(self.valid_files, on_read)
        own = read_documents(self.train_files, on_read)
        if not self.valid_files:
            own = self._part(split, own)
        return chain(own, read_documents(self.extra_train, on_read)) if split == "train" else own

    @cached_property
    def _counts(self) -> tuple[int, int]:
        """Documents and characters of the files that are split, counted in a pass of their own."""
        documents = characters = 0
        for piece in read_documents(self.train_files):
            documents += piece.ends_document
            characters += len(piece.text)
        return documents, characters

    def _part(self, split: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The first documents for `train` and the last for `valid`; a single document is cut at the end of a line."""
        documents, characters = self._counts
        if documents == 1:
            yield from cut_document(pieces, int(characters * (1 - self.valid_fraction)), split)
            return
        held_out = min(documents - 1, max(1, round(documents * self.valid_fraction)))
        index = 0
        for piece in pieces:
            if (index >= documents - held_out) == (split == "valid"):
                yield piece
            index += piece.ends_document

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source: name, files and their checksums."""
        return {
            "name": self.name,
            "train_files": [describe_file(path) for path in self.train_files + self.extra_train],
            "valid_files": [describe_file(path) for path in self.valid_files],
            "valid_fraction": None if self.valid_files else self.valid_fraction,
        }


Corpus = EmbeddedCorpus | TextCorpus


def total_bytes(paths: tuple[Path, ...]) -> int:
    """Bytes on disk of all files."""
    return sum(path.stat().st_size for path in paths)


def describe_file(path: Path) -> dict[str, Any]:
    """Name, size and checksum of a source file, wherever it lies."""
    try:
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def cut_document(pieces: Iterator[Piece], position: int, split: str) -> Iterator[Piece]:
    """One document's part before (`train`) or after (`valid`) the first end of a line past the character `position`.

    Where no line ends there, the cut is at a space before it.
    """
    end = 0
    for piece in pieces:
        start, end = end, end + len(piece.text)
        if start <= position < end:
            cut = piece.text.find("\n", position - start)
            if cut < 0:
                cut = safe_cut(piece.text, position - start) or position - start
            if split == "train":
                yield Piece(piece.text[:cut].rstrip(), True)
                return
            yield Piece(piece.text[cut:].lstrip(), piece.ends_document)
        elif (end <= position) == (split == "train"):
            yield piece


def open_corpus(source: str | os.PathLike, config: CorpusConfig | None = None, *, progress: bool = True) -> Corpus:
    """The corpus that `source` names: `embedded`, a download (`tinystories`, `openwebtext`, `wikitext103`), or a path.

    A path is a UTF-8 text file, plain or `.gz`, with `<|endoftext|>` between documents, or a folder of such files.
    In a folder, the file named exactly `train` (before its suffixes) is the training split, else the only one with
    that word in its name (`owt_train.txt.gz`); likewise `valid`, `validation` or `val`. A folder without a training
    file is all its text files in order of name. Raises `UserError` if nothing fits, or more than one file does.
    """
    config = config or CorpusConfig()
    extra = tuple(Path(path) for path in config.extra_train)
    chosen = (Path(config.valid),) if config.valid else ()
    if source == "embedded":
        require(not extra and not chosen, "The embedded corpus takes neither valid nor extra_train files.")
        return EmbeddedCorpus(config.seed, config.num_documents, config.valid_fraction)
    if source in SOURCES:
        files = download(str(source), config.download_folder, mirror=config.mirror, progress=progress)
        return TextCorpus(str(source), (files["train"],), chosen or (files["valid"],), config.valid_fraction, extra)
    path = Path(source)
    require(
        path.exists(),
        f"There is no file or folder {path}; name one, or one of the sources embedded, {', '.join(SOURCES)}.",
    )
    train, valid = split_files(path) if path.is_dir() else ((path,), ())
    return TextCorpus(path.name, train, chosen or valid, config.valid_fraction, extra)


def split_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Training and validation files of a folder, by the rule in `open_corpus`."""
    texts = sorted(path for path in folder.iterdir() if is_text_file(path))
    require(bool(texts), f"There is no text file ({', '.join(TEXT_SUFFIXES)}, plain or .gz) in {folder}.")
    train, valid = file_of_split("train", texts, folder), file_of_split("valid", texts, folder)
    if train is None:
        return tuple(path for path in texts if path != valid), (valid,) if valid else ()
    return (train,), (valid,) if valid else ()


def file_of_split(split: str, texts: list[Path], folder: Path) -> Path | None:
    """The only file whose name is one of the split's, else the only one that has one of them as a word."""
    names = SPLIT_NAMES[split]
    exact = [path for path in texts if stem(path) in names]
    found = exact or [path for path in texts if set(re.split(r"[^a-z0-9]+", stem(path))) & set(names)]
    require(
        len(found) < 2,
        f"{folder} has several files for the split {split!r} ({', '.join(path.name for path in found)}); name the "
        "file that is meant instead of the folder, or keep one of them there.",
    )
    return found[0] if found else None


def is_text_file(path: Path) -> bool:
    """Whether the name is that of a plain or gzipped text file, and not a hidden one."""
    name = path.name.lower().removesuffix(".gz")
    return path.is_file() and not name.startswith(".") and name.endswith(TEXT_SUFFIXES)


def stem(path: Path) -> str:
    """The name in lower case, without `.gz` and without the suffix before it."""
    return Path(path.name.lower().removesuffix(".gz")).stem
