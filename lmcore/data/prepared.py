"""Prepared corpora: token memmaps beside a manifest that says what is in them, opened only if that is true."""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.tokenizer import Tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "valid")
MANIFEST = "manifest.json"
CHECKED = "checked.json"
TOKENIZER_FOLDER = "tokenizer"
SCAN_BYTES = 1 << 22


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
        content = {
            key: self.manifest[key] for key in ("format_version", "dtype", "vocab_size", "tokenizer_fingerprint")
        }
        content |= {split: self.manifest["splits"][split]["sha256"] for split in SPLITS}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

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

    Sizes are held against the manifest each time. Checksums and ids are checked by reading the files once in pieces,
    and again only when a file has changed since (size or time of change) or with `verify=True`. Raises `UserError`,
    naming the file and what is wrong with it.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    arrays = {split: map_tokens(folder, manifest, split) for split in SPLITS}
    if verify or not already_checked(folder, manifest):
        for split, array in arrays.items():
            check_tokens(array, manifest, split)
        remember_checked(folder, manifest)
    return PreparedData(folder, manifest, arrays["train"], arrays["valid"])


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
        complete = np.issubdtype(np.dtype(manifest["dtype"]), np.integer)
        complete &= all(
            isinstance(value, int) and value > 0
            for value in (manifest["vocab_size"], *(manifest["splits"][split]["tokens"] for split in SPLITS))
        )
        complete &= all(
            isinstance(value, str)
            for value in (manifest["tokenizer_fingerprint"], *(manifest["splits"][split]["sha256"] for split in SPLITS))
        )
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
    """Reads all ids in pieces: none may be out of the vocabulary, and the checksum must be the manifest's."""
    digest = hashlib.sha256()
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
    require(
        digest.hexdigest() == manifest["splits"][split]["sha256"],
        f"{ids.filename} has changed since it was prepared (its checksum is not the one in {MANIFEST}); run "
        "`lmcore data prepare` again.",
    )


def bin_path(folder: Path, split: str) -> Path:
    """The file of a split's ids."""
    return folder / f"{split}.bin"


def file_states(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What a later opening compares: size, time of change and expected content of both files."""
    stats = {split: bin_path(folder, split).stat() for split in SPLITS}
    return {
        split: [stat.st_size, stat.st_mtime_ns, manifest["splits"][split]["sha256"], manifest["vocab_size"]]
        for split, stat in stats.items()
    }


def already_checked(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether an earlier opening has read these very files and found them right."""
    try:
        return read_json(folder / CHECKED) == file_states(folder, manifest)
    except UserError:
        return False


def remember_checked(folder: Path, manifest: dict[str, Any]) -> None:
    """Notes that the files are right; where the folder is not ours to write, the next opening reads them again."""
    try:
        write_json(folder / CHECKED, file_states(folder, manifest))
    except UserError:
        return
