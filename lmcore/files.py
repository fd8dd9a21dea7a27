"""Files that are either whole or absent: write beside, fsync, rename."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lmcore.errors import UserError


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO]:
    """Opens a temporary file beside `path` and renames it to `path` only if the block ends without an error.

    The data is fsynced before the rename and the folder after it, so that a crash at any moment leaves the old file
    or the new one, never a part. Raises `UserError` when the folder cannot be written to or is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}; nothing was changed there.") from error
    finally:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_write(path, "w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, default=str)
        file.write("\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file. Raises `UserError` if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from error


def sha256_file(path: str | os.PathLike, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces of 1 MiB; `progress` is called with the bytes of each."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()
