"""From the name of a source, or a path, to its training and validation documents, as a stream."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lmcore.config import CorpusConfig
from lmcore.data.downloads import HUB, SOURCES, download, download_parquet
from lmcore.errors import require
from lmcore.files import require_exists, sha256_file
from lmcore.text import END_OF_TEXT, RECORDS, plain_name, read_text
from lmcore.tokenizer.pretokenize import safe_pieces

TEXT_SUFFIXES = (".txt", ".text", ".md")
SPLIT_NAMES = {"train": {"train"}, "valid": {"valid", "validation", "val"}}
NAMED = 5
"""Records that are named of those skipped."""
PIECE_CHARACTERS = 1 << 20
"""Text in which documents are looked for at a time."""


def split_documents(chunks: Iterable[str], piece_characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Documents between `<|endoftext|>`, without the white space around that token and without empty ones."""
    parts: list[str] = []
    for piece in safe_pieces(chain(chunks, [END_OF_TEXT]), [END_OF_TEXT], piece_characters):
        for number, text in enumerate(piece.split(END_OF_TEXT)):
            if number:
                if document := "".join(parts).strip():
                    yield document
                parts = []
            parts.append(text)


def read_documents(paths: Iterable[Path], field: str = "text", skipped: dict[Path, str] | None = None) -> Iterator[str]:
    """The documents of several files, one file after the other; a file's end also ends its last document.

    `skipped` gets what is wrong with records of the files that were read to their end.
    """
    for path in paths:
        faulty: list[str] = []
        documents = split_documents(read_text(path, field, faulty))
        first = next(documents, None)
        require(first is not None, f"{path} holds no text{in_short(faulty)}.")
        yield from chain([first], documents)
        if skipped is not None and faulty:
            skipped[path] = in_short(faulty)


def in_short(faulty: Sequence[str]) -> str:
    """How many records were skipped, and the first of them; empty if there are none."""
    more = ", …" * (len(faulty) > NAMED)
    return f" ({len(faulty):,} records skipped: {', '.join(faulty[:NAMED])}{more})" if faulty else ""


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Stories of `lmcore.data.grammar`; the splits are independent streams of one seed."""

    seed: int = 0
    num_documents: int = 20_000
    valid_fraction: float = 0.1
    name: str = "embedded"

    def documents(self, split: str) -> Iterator[str]:
        """The documents of the split `train` or `valid`."""
        size = self.num_documents if split == "train" else max(1, round(self.num_documents * self.valid_fraction))
        from lmcore.data.grammar import stories

        return islice(stories(self.seed, split), size)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""
        return asdict(self)


@dataclass(frozen=True)
class TextCorpus:
    """Documents of text files; without validation files, the last `valid_fraction` of the documents are held out."""

    name: str
    train_files: tuple[Path, ...]
    valid_files: tuple[Path, ...] = ()
    valid_fraction: float = 0.1
    field: str = "text"

    def __post_init__(self):
        for path in self.train_files + self.valid_files:
            next(read_text(path, self.field), None)  # what is missing or no text is refused before anything is made

    def documents(self, split: str) -> Iterator[str]:
        """The documents of the split `train` or `valid`, streamed from the files.

        Where there is only one document to be split, it is cut.
        """
        if self.valid_files:
            return self._read(self.valid_files if split == "valid" else self.train_files)
        documents = self._read(self.train_files)
        if self._num_documents == 1:
            text = next(documents)
            cut = int(len(text) * (1 - self.valid_fraction))
            return iter([text[:cut] if split == "train" else text[cut:]])
        held_out = min(self._num_documents - 1, max(1, round(self._num_documents * self.valid_fraction)))
        trained = self._num_documents - held_out
        return islice(documents, trained) if split == "train" else islice(documents, trained, None)

    @cached_property
    def skipped(self) -> dict[Path, str]:
        """What is wrong with records, by file."""
        return {}

    def _read(self, paths: Iterable[Path]) -> Iterator[str]:
        return read_documents(paths, self.field, self.skipped)

    @cached_property
    def _num_documents(self) -> int:
        """Documents of the training files, counted in a pass of their own."""
        return sum(1 for _ in self._read(self.train_files))

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source: name, files and their checksums. Raises `UserError` for a name that is
        not UTF-8, which a manifest cannot hold."""
        for name in (self.name, *(path.name for path in self.train_files + self.valid_files)):
            escaped = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
            require(name == name.encode(errors="replace").decode(), f"The name {escaped} is not UTF-8; rename it.")
        return {
            "name": self.name,
            "train_files": [describe_file(path) for path in self.train_files],
            "valid_files": [describe_file(path) for path in self.valid_files],
            "valid_fraction": None if self.valid_files else self.valid_fraction,
            "field": self.field,
        }


Corpus = EmbeddedCorpus | TextCorpus


def describe_file(path: Path) -> dict[str, Any]:
    """Name, size and checksum of a source file, wherever it lies."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def open_corpus(source: str | os.PathLike, config: CorpusConfig | None = None, *, progress: bool = True) -> Corpus:
    """The corpus that `source` names: `embedded`, a download (`tinystories`, `openwebtext`, `wikitext103`), or a path.

    A path is a UTF-8 text file with `<|endoftext|>` between documents, a file of records (`.jsonl`, `.parquet`), whose
    `config.field` holds the text of a document each, a folder of such files and of folders, or a pattern for their
    paths (`texts/*.jsonl`). All but `.parquet` may be compressed (`.gz`, `.zst`). `hf:OWNER/NAME` is a data set of
    Hugging Face, which has all of them as Parquet files, too.

    Of several files, the one named exactly `train` (before its suffixes) is the training split, else the only one with
    that word in its name (`owt_train.txt.gz`), or those that differ by a number alone; likewise `valid`, `validation`
    or `val`. Without a training file all of them are, in order of name. Raises `UserError` if nothing fits, or more
    than one file does.
    """
    config = config or CorpusConfig()
    chosen = (Path(config.valid),) if config.valid else ()
    if source == "embedded":
        require(not chosen, "The embedded corpus has its own validation stories: leave out valid.")
        return EmbeddedCorpus(config.seed, config.num_documents, config.valid_fraction)
    if source in SOURCES:
        files = download(str(source), config.download_folder, progress=progress)
        return TextCorpus(str(source), (files["train"],), chosen or (files["valid"],), config.valid_fraction)
    path = Path(source)
    if str(source).startswith(HUB):
        files = download_parquet(str(source), config.download_folder, progress=progress)
        train, valid = files["train"], files["valid"]
    elif path.is_dir():
        train, valid = split_files(text_files(path), path)
    elif not path.exists() and (found := sorted(map(Path, glob.glob(str(source), recursive=True)))):
        train, valid = split_files([path for path in found if path.is_file()], path)
    else:
        require_exists(path, f"; named sources are embedded, {', '.join(SOURCES)} and {HUB}OWNER/NAME")
        train, valid = (path,), ()
    return TextCorpus(path.name, train, chosen or valid, config.valid_fraction, config.field)


def text_files(folder: Path) -> list[Path]:
    """The files of a folder, and of the folders in it, whose names end like those of texts, in order of name.

    Files with records that are not read count, so that they are refused and not passed over; but JSON often describes
    the others.
    """
    suffixes = (*TEXT_SUFFIXES, *RECORDS, ".csv", ".tsv")
    texts = [
        path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
        and plain_name(path).endswith(suffixes)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    known = ", ".join((*TEXT_SUFFIXES, *RECORDS))
    require(bool(texts), f"There is no text file ({known}; plain, .gz or .zst) in {folder}.")
    return texts


def split_files(texts: Sequence[Path], source: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Training and validation files among those of a folder or pattern, by the rule in `open_corpus`."""
    found, stems = {}, {path: Path(plain_name(path)).stem for path in texts}
    for split, names in SPLIT_NAMES.items():
        exact = tuple(path for path in texts if stems[path] in names)
        found[split] = exact or tuple(path for path in texts if names & {*re.split(r"[^a-z0-9]+", stems[path])})
        several = ", ".join(path.name for path in found[split])
        words = f"{source} has several files for the split {split!r} ({several}): name the file that is meant instead."
        require(len({re.sub(r"\d+", "", stems[path]) for path in found[split]}) < 2, words)
    return found["train"] or tuple(path for path in texts if path not in found["valid"]), found["valid"]
