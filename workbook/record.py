"""The record of a workbook: which notebooks are planned in a folder, and what became of each of them.

Every notebook has a file and a lock of its own, so that several processes may run notebooks in one folder.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import is_locked, locked, read_json, write_json
from workbook.notebook import read_notebook, tags

RECORD = "workbook.json"
"""The plan: scale, data, and the names of the notebooks in order."""

LOCK_SECONDS = 2.0
"""How long a notebook's lock is waited for: someone who only asks whether it is held has it for a moment."""
PLAN_SECONDS = 60.0


@dataclass
class NotebookRecord:
    """What became of one notebook, and of what it was made."""

    name: str
    state: str = "not run"
    """not run, running, done, failed or stopped."""
    seconds: float = 0.0
    cell: int | None = None
    """Code cell that failed or was stopped, from 1."""
    heading: str | None = None
    """The heading under which it stands."""
    error: str | None = None
    """Why it failed, or the name of the signal that stopped it."""
    scale: str | None = None
    data: str | None = None
    parameters: dict[str, Any] | None = None
    source: str | None = None
    """SHA-256 of the notebook's cells, without outputs."""
    environment: dict[str, Any] | None = None
    """Provenance of the latest start."""
    job: str | None = None
    """The batch system's number of the job that ran it."""

    def stands_for(self, other: "NotebookRecord") -> bool:
        """Whether this is of a finished run of the very notebook that `other` is about to run."""
        keys = ("scale", "data", "parameters", "source")
        return self.state == "done" and all(getattr(self, key) == getattr(other, key) for key in keys)


def sentence(entry: Mapping[str, Any]) -> str | None:
    """The state of a notebook in words, or None if it is done."""
    name, state, cell = f"Notebook {entry['name']}", entry["state"], entry.get("cell")
    where = f" at code cell {cell}" if cell else ""
    where += f" (under “{entry['heading']}”)" if entry.get("heading") else ""
    reason = entry.get("error")
    return {
        "not run": f"{name} was not run.",
        "running": f"{name} is still running.",
        "failed": f"{name} failed{where}: {reason}.",
        "stopped": f"{name} was stopped{f' by {reason}' if reason else ''}{where or ' before its end'}.",
    }.get(state)


def unfinished(record: Mapping[str, Any]) -> list[str]:
    """A sentence for each notebook of the plan that is not done."""
    return [words for entry in record["notebooks"] if (words := sentence(entry))]


def source_hash(path: Path) -> str:
    """SHA-256 of kind, tags and text of a notebook's cells: outputs and metadata of runs leave it as it is."""
    cells = [[cell.cell_type, tags(cell), cell.source] for cell in read_notebook(path).cells]
    return hashlib.sha256(json.dumps(cells, ensure_ascii=False).encode()).hexdigest()


def record_file(out: Path, name: str) -> Path:
    """The file that holds the record of one notebook."""
    return out / "notebooks" / f"{name}.json"


def read_notebook_record(out: Path, name: str) -> NotebookRecord | None:
    """The record of one notebook, or None if it was never run here."""
    file = record_file(out, name)
    return _whole(file, lambda values: NotebookRecord(**values)) if file.exists() else None


def write_notebook_record(out: Path, record: NotebookRecord) -> None:
    """Replaces the record of one notebook."""
    write_json(record_file(out, record.name), dataclasses.asdict(record))


def read_plan(out: Path) -> dict[str, Any]:
    """out/workbook.json: scale, data and the names of the notebooks. Raises `UserError` if it is missing or damaged."""
    words = f"There is no workbook in {out} (no {RECORD}): run `workbook run --out {out}`, or name its folder."
    require((out / RECORD).exists(), words)
    return _whole(out / RECORD, lambda plan: {**plan, **{key: plan[key] for key in ("scale", "data", "notebooks")}})


def _whole(file: Path, made: Any) -> Any:
    try:
        return made(read_json(file))
    except (TypeError, KeyError) as error:
        raise UserError(f"{file} is damaged ({error}); remove it and run the workbook again.") from None


def read_record(out: str | os.PathLike) -> dict[str, Any]:
    """The plan with what became of its notebooks: {scale, data, notebooks: [record, ...]}.

    A record of another scale or other data than the plan's is left out: its notebook was "not run". One that says
    "running" while nobody holds the notebook was "stopped" with its process. Raises `UserError` where there is no plan.
    """
    out = Path(out)
    plan, records = read_plan(out), []
    for name in plan["notebooks"]:
        record = read_notebook_record(out, name)
        if record is None or (record.scale, record.data) != (plan["scale"], plan["data"]):
            record = NotebookRecord(name)
        if record.state == "running" and not is_locked(lock_file(out, name)):
            record.state = "stopped"
        records.append(dataclasses.asdict(record))
    return {"scale": plan["scale"], "data": plan["data"], "notebooks": records}


def update_plan(out: str | os.PathLike, scale: str, data: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Adds notebooks to the plan in `out`; `known` are all notebooks of the project, in order.

    A plan of another scale or other data is replaced.
    """
    out = Path(out)
    with locked(out / ".workbook.lock", f"Another process is writing to {out}; try again.", PLAN_SECONDS):
        there = []
        if (out / RECORD).exists():
            before = read_plan(out)
            there = before["notebooks"] if (before["scale"], before["data"]) == (scale, data) else []
        planned = [name for name in known if name in {*there, *names}]
        write_json(out / RECORD, {"scale": scale, "data": data, "notebooks": planned})


def lock_file(out: Path, name: str) -> Path:
    """The file whose lock a process holds while it runs the notebook."""
    return out / "notebooks" / f".{name}.lock"


@contextmanager
def holding(out: Path, names: Sequence[str]) -> Iterator[None]:
    """Holds notebooks for this process. Raises `UserError` naming the first that another one runs."""
    with ExitStack() as stack:
        for name in names:
            busy = f"Another process is running notebook {name} in {out}; wait for it or choose another OUT."
            stack.enter_context(locked(lock_file(out, name), busy, LOCK_SECONDS))
        yield
