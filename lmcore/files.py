"""Files that are either whole or absent: write beside, fsync, rename."""

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from lmcore.errors import UserError

CHECKSUM = "crc32"
"""Key of the checksum in a value that has one."""


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO]:
    """Opens a temporary file beside `path` and renames it to `path` only if the block ends without an error.

    The data is fsynced before the rename and the folder after it, so that a crash at any moment leaves the old file
    or the new one, never a part. Raises `UserError` when the folder cannot be written to or is full.
    """
    path = Path(path)
    # process ids repeat on the hosts that share a file system
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
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


def leftovers(path: Path) -> list[Path]:
    """Temporary files beside `path` of processes that were killed while they wrote it."""
    return sorted(path.parent.glob(f".{path.name}.*.tmp"))


def is_locked(lock: Path) -> bool:
    """Whether a process holds a lock file at this moment; not so where it is not there, or can only be read."""
    try:
        if lock.exists():
            FileLock(lock).acquire(timeout=0).lock.release()
    except OSError as error:
        return isinstance(error, Timeout)
    return False


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_write(path, "w") as file:
        file.write(_as_json(value))


def write_in_place(path: str | os.PathLike, value: Any) -> None:
    """Writes JSON over a file that is there: where the disk is full there may be room for that only.

    Not atomic: for values that are checksummed and can be done without. Raises `UserError` if it cannot be written.
    """
    try:
        with open(path, "r+", encoding="utf-8") as file:
            file.write(_as_json(value))
            file.truncate()
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file. Raises `UserError` if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from error


def checksummed(value: dict[str, Any], previous: str = "") -> dict[str, Any]:
    """`value` with a checksum over its JSON and over `previous`, the checksum of the value before it in a file."""
    text = json.dumps(value, default=str)
    return value | {CHECKSUM: f"{zlib.crc32(text.encode(), int(previous or '0', 16)):08x}"}


def verified(value: dict[str, Any], previous: str = "") -> dict[str, Any] | None:
    """A value without its checksum; None if that does not match. A value that has none is taken as it is."""
    plain = {key: item for key, item in value.items() if key != CHECKSUM}
    return plain if CHECKSUM not in value or checksummed(plain, previous) == value else None


def sha256_file(path: str | os.PathLike, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces of 1 MiB; `progress` is called with the bytes of each."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()
