"""What became of each notebook of an output folder: a file in OUT/notebooks, and a lock held while it runs.

Each notebook has its own, so that several processes may run notebooks in one folder.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import is_locked, locked, read_json, write_json
from workbook.notebook import read_notebook, tags


@dataclass
class NotebookRecord:
    """What became of one notebook, and of what it was made."""

    name: str
    state: str = "not run"
    """not run, running, done, failed or stopped."""
    seconds: float = 0.0
    cell: int | None = None
    """Code cell that failed or was stopped, from 1."""
    error: str | None = None
    """Why it failed, or the name of the signal that stopped it."""
    scale: str | None = None
    data: str | None = None
    parameters: dict[str, Any] | None = None
    source: str | None = None
    """SHA-256 of the notebook's cells, without outputs."""
    environment: dict[str, Any] | None = None
    """Provenance of the latest start."""

    def stands_for(self, other: "NotebookRecord") -> bool:
        """Whether this is of a finished run of the very notebook that `other` is about to run."""
        keys = ("scale", "data", "parameters", "source")
        return self.state == "done" and all(getattr(self, key) == getattr(other, key) for key in keys)

    @property
    def unfinished(self) -> str | None:
        """A sentence on a notebook that is not done; None if it is."""
        name, where = f"Notebook {self.name}", f" at code cell {self.cell}" if self.cell else ""
        return {
            "not run": f"{name} was not run.",
            "running": f"{name} is still running.",
            "failed": f"{name} failed{where}: {self.error}.",
            "stopped": f"{name} was stopped{f' by {self.error}' if self.error else ''}{where or ' before its end'}.",
        }.get(self.state)


def unfinished(records: Sequence[NotebookRecord]) -> list[str]:
    """A sentence for each notebook that is not done."""
    return [record.unfinished for record in records if record.unfinished]


def source_hash(path: Path) -> str:
    """SHA-256 of kind, tags and text of a notebook's cells: outputs and metadata of runs leave it as it is."""
    cells = [[cell.cell_type, tags(cell), cell.source] for cell in read_notebook(path).cells]
    return hashlib.sha256(json.dumps(cells, ensure_ascii=False).encode()).hexdigest()


def record_file(out: Path, name: str) -> Path:
    """The file that holds the record of one notebook."""
    return out / "notebooks" / f"{name}.json"


def write_record(out: Path, record: NotebookRecord) -> None:
    """Replaces the record of one notebook."""
    write_json(record_file(out, record.name), asdict(record))


def read_record(out: Path, name: str) -> NotebookRecord | None:
    """The record of one notebook, or None if there is none; one that runs in no process was stopped with its own."""
    if not (file := record_file(out, name)).exists():
        return None
    try:
        record = NotebookRecord(**read_json(file) | {"name": name})
    except TypeError as error:
        raise UserError(f"{file} is damaged ({error}); remove it and run the workbook again.") from None
    if record.state == "running" and not is_locked(lock_file(out, name)):
        record.state = "stopped"
    return record


def read_records(out: Path) -> list[NotebookRecord]:
    """The records of all notebooks, in order. Raises `UserError` where there are none, or one is damaged."""
    records = [read_record(out, path.stem) for path in sorted((out / "notebooks").glob("*.json"))]
    require(bool(records), f"There is no workbook in {out}: run `workbook run --out {out}`, or name its folder.")
    return [record for record in records if record]


def remove_others(out: Path, scale: str, data: str) -> None:
    """Removes the records of another scale or of other data."""
    for path in (out / "notebooks").glob("*.json"):
        record = read_record(out, path.stem)
        if record and (record.scale, record.data) != (scale, data):
            path.unlink()


def lock_file(out: Path, name: str) -> Path:
    """The file whose lock a process holds while it runs the notebook."""
    return out / "notebooks" / f".{name}.lock"


@contextmanager
def holding(out: Path, names: Sequence[str]) -> Iterator[None]:
    """Holds notebooks for this process. Raises `UserError` naming the first that another one runs."""
    with ExitStack() as stack:
        for name in names:
            busy = f"Another process is running notebook {name} in {out}; wait for it or choose another OUT."
            # who only asks whether it is held, has it for a moment
            stack.enter_context(locked(lock_file(out, name), busy, seconds=2.0))
        yield
