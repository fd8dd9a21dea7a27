"""Records of measured cells, and who may measure a cell: the files that jobs which know nothing of each other share."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lmcore.config import from_dict
from lmcore.errors import UserError
from lmcore.files import atomic_write, read_json
from lmcore.profiling.workload import WorkloadConfig

FINISHED = ("complete", "out of memory")

SECONDS_OF_A_LOOK = 2.0
"""How long a cell may be held by someone who only looks whether it is held."""


def finished_record(
    path: Path, task: str, config: WorkloadConfig, required: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The record in `path` if it is of this very measurement and its environment has the values of `required`."""
    record = read_record(path)
    if record is None or not is_of(record, task, config) or record["outcome"] not in FINISHED:
        return None
    there = record["environment"]
    return record if all(there.get(key) == value for key, value in required.items()) else None


def read_record(path: Path) -> dict[str, Any] | None:
    """The record in `path`; None if there is none, or if it is damaged: such a cell is measured again."""
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except UserError:
        return None
    keys = {"cell", "task", "config", "outcome", "reason", "result", "environment"}
    whole = isinstance(record, dict) and keys <= set(record) and isinstance(record["environment"], dict)
    if not whole or (record["outcome"] == "complete" and not isinstance(record["result"], dict)):
        return None
    return record


def is_of(record: Mapping[str, Any], task: str, config: WorkloadConfig) -> bool:
    """Whether this is a record of this very measurement; fields missing in its configuration have their defaults."""
    try:
        return record["task"] == task and from_dict(WorkloadConfig, record["config"]) == config
    except UserError:  # a field that there is no more, or a value that it no longer takes
        return False


def require_writable(folder: Path) -> None:
    """Makes the folder. Raises `UserError` if it cannot be written to."""
    with atomic_write(folder / ".writable"):
        pass
    (folder / ".writable").unlink(missing_ok=True)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. Raises `UserError` if another measures there."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"Another process is measuring in {folder}; wait for it or choose another folder.") from None
    try:
        yield
    finally:
        lock.release()


def cell_lock(folder: Path, name: str) -> Path:
    """The file that the process which measures a cell holds. It stays: with no record beside it, the cell was ended."""
    return folder / f".{name}.lock"


@contextlib.contextmanager
def holding_cell(folder: Path, name: str) -> Iterator[None]:
    """Holds a cell for this process. Raises `UserError` if another measures it."""
    lock = FileLock(cell_lock(folder, name))
    try:
        lock.acquire(timeout=SECONDS_OF_A_LOOK)
    except Timeout:
        raise UserError(f"Another process is measuring {name} in {folder}; wait for it or leave it to that.") from None
    try:
        yield
    finally:
        lock.release()


def is_measured_now(folder: Path, name: str) -> bool:
    """Whether a process measures this cell at this moment."""
    if not cell_lock(folder, name).exists():
        return False
    lock = FileLock(cell_lock(folder, name))
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True
