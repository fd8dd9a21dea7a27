"""Files that are either whole or absent: write beside, fsync, rename. What is read is data and nothing else."""

import difflib
import errno
import fcntl
import glob
import hashlib
import json
import os
import pickle
import secrets
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lmcore.errors import UserError, require

CHECKSUM = "crc32"
"""Key of the checksum in a value that has one."""

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""What a file system answers that is mounted without locks, as Lustre and NFS can be."""

SECONDS_TO_HOLD = 0.5
"""Temporary files and folders are locked once they are made; an older one that is not was left by a killed process."""


class Busy(UserError):
    """Another process holds a lock."""


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
            with suppress(OSError):  # where files cannot be locked, what is left stays
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_abandoned(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, UnicodeEncodeError) as error:  # names of files, which may be any bytes, go into files, too
        said = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot write {path}: {said}; nothing was changed there.") from error
    finally:
        with suppress(OSError):  # on a read-only file system even for a file that is not there
            temporary.unlink()


@contextmanager
def temporary_folder(prefix: str, parent: str | os.PathLike | None = None) -> Iterator[Path]:
    """A folder for the block, in `parent` or where temporary files go; those that killed processes left are removed."""
    parent = Path(parent or tempfile.gettempdir())
    remove_abandoned(parent.glob(f"{glob.escape(prefix)}*"))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name, open(Path(name, ".lock"), "wb") as lock:
        with suppress(OSError):  # where files cannot be locked, what is left stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


@contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A folder that becomes `path` if the block ends without an error. Raises `UserError` if there is such a path."""
    path = Path(path)
    require(not os.path.lexists(path), f"{path} is there already; choose another folder, or remove it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{path.name}-", path.parent) as temporary:
            (new := temporary / "new").mkdir()
            yield new
            new.rename(path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Removes those of the temporary files and folders that no living process holds."""
    for path in paths:
        with suppress(OSError), open(path / ".lock" if path.is_dir() else path, "rb+") as held:  # others' are not ours
            if time.time() - path.stat().st_mtime > SECONDS_TO_HOLD and not path.is_symlink():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while the process lives that has it
                remove(path)


def remove(path: Path) -> None:
    """Removes a file or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(lock: Path, busy: str, seconds: float = 0.0) -> Iterator[None]:
    """Holds a lock file for the block. Raises `Busy(busy)` if another process has it for so long (-1: wait for it).

    Raises `UserError` where the folder cannot be written to, or files cannot be locked.
    """
    from filelock import FileLock, Timeout  # here, as the help of commands does without them

    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock).acquire(timeout=seconds)
    except Timeout:
        raise Busy(busy) from None
    except (OSError, NotImplementedError) as error:
        if (number := getattr(error, "errno", errno.ENOSYS)) not in NO_LOCKS:
            raise UserError(f"The folder {lock.parent} cannot be written to ({os.strerror(number)}).") from error
        raise UserError(
            f"The file system of {lock.parent} cannot lock files, so two processes could spoil what is there; mount it "
            "with flock, or choose a folder on another file system."
        ) from error
    with held:
        yield


def is_locked(lock: Path) -> bool:
    """Whether a process holds a lock file at this moment; not so where it is not there, or can only be read."""
    from filelock import FileLock, Timeout

    try:
        if lock.exists():
            FileLock(lock).acquire(timeout=0).lock.release()
    except (OSError, NotImplementedError) as error:
        return isinstance(error, Timeout)
    return False


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_write(path, "w") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file. Raises `UserError` if it is missing or is not JSON."""
    path = not_a_pipe(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}).") from error


def checksummed(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with a checksum over its JSON."""
    return value | {CHECKSUM: f"{zlib.crc32(json.dumps(value, default=str).encode()):08x}"}


def verified(value: dict[str, Any]) -> dict[str, Any] | None:
    """A value without its checksum; None if that does not match."""
    plain = {key: item for key, item in value.items() if key != CHECKSUM}
    return plain if checksummed(plain) == value else None


def sha256_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file in hexadecimal."""
    with open(not_a_pipe(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_exists(path: str | os.PathLike, hint: str = "") -> None:
    """Raises `UserError` if there is no such file or folder; it names the one that may be meant.

    Commands ask before they import what takes long.
    """
    path = Path(path)
    if os.path.lexists(path):
        return
    there, near = next(parent for parent in path.parents if parent.exists()), []
    first, *rest = path.relative_to(there).parts
    with suppress(OSError):
        near = [there.joinpath(name, *rest) for name in difflib.get_close_matches(first, os.listdir(there))]
    meant = next((f"; did you mean {other}?" for other in near if other.exists()), f"{hint}.")
    raise UserError(f"There is no file or folder {path}{meant}")


def not_a_pipe(path: str | os.PathLike) -> Path:
    """The path, to be opened. Raises `UserError` for a pipe in a file's place: opening it could wait forever."""
    with suppress(OSError):  # what is not there, opening says
        mode = os.stat(path).st_mode
        require(not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode), f"{path} is a pipe, not a file.")
    return Path(path)


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dictionaries; of what has to be imported, only what `allowed` holds."""

    def __init__(self, file: IO[bytes], allowed: Mapping[tuple[str, str], Any] | None = None):
        super().__init__(file)
        self.allowed = allowed or {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        return self.allowed[module, name]
