"""The record of a workbook: which notebooks are planned in a folder, and what became of each of them.

Every notebook has a file and a lock of its own, so that several processes may run notebooks in one folder.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import is_locked, locked, read_json, write_json
from lmcore.workbook.notebook import read_notebook, tags

RECORD = "workbook.json"
"""The plan: scale, data, and the names of the notebooks in order."""

STATES = ("not run", "running", "done", "failed", "stopped")
LOCK_SECONDS = 2.0
"""How long a lock is waited for: someone who only asks whether it is held has it for a moment."""
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

    @property
    def sentence(self) -> str | None:
        """The state in words, or None if the notebook is done."""
        return sentence(dataclasses.asdict(self))

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


def as_json(value: Any) -> Any:
    """Plain data as it comes back from a file: tuples as lists, paths as text."""
    return json.loads(json.dumps(value, default=str))


def source_hash(path: Path) -> str:
    """SHA-256 of kind, tags and text of a notebook's cells: outputs and metadata of runs leave it as it is."""
    cells = [[cell.cell_type, tags(cell), cell.source] for cell in read_notebook(path).cells]
    return hashlib.sha256(json.dumps(cells, ensure_ascii=False).encode()).hexdigest()


def record_file(out: Path, name: str) -> Path:
    """The file that holds the record of one notebook."""
    return out / "notebooks" / f"{name}.json"


def _read(file: Path, is_good: Callable[[dict[str, Any]], bool], must: str, remedy: str) -> dict[str, Any]:
    """A JSON file of this folder. Raises `UserError`, which ends in the remedy, for a damaged one."""
    try:
        values = read_json(file)
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; {remedy}.") from None
    require(isinstance(values, dict) and is_good(values), f"{file} is damaged: it must name {must}; {remedy}.")
    return values


def _record(values: Mapping[str, Any]) -> NotebookRecord:
    known = {field.name for field in dataclasses.fields(NotebookRecord)}
    return NotebookRecord(**{key: value for key, value in values.items() if key in known})


def read_notebook_record(out: Path, name: str) -> NotebookRecord | None:
    """The record of one notebook, or None if it was never run here. Raises `UserError` for a damaged file."""
    file = record_file(out, name)
    if not file.exists():
        return None
    return _record(
        _read(
            file,
            lambda values: values.get("name") == name and values.get("state") in STATES,
            "the notebook and its state",
            "remove it to run the notebook again",
        )
    )


def write_notebook_record(out: Path, record: NotebookRecord) -> None:
    """Replaces the record of one notebook."""
    write_json(record_file(out, record.name), dataclasses.asdict(record))


def read_plan(out: Path) -> dict[str, Any]:
    """out/workbook.json: scale, data and the names of the notebooks; and `old`, their records by name where it was made
    when there were no other files. Raises `UserError` if it is missing or damaged.
    """

    def is_good(plan: dict[str, Any]) -> bool:
        notebooks = plan.get("notebooks")
        return (
            {"scale", "data"} <= plan.keys()
            and isinstance(notebooks, list)
            and all(isinstance(n, str) or (isinstance(n, dict) and {"name", "state"} <= n.keys()) for n in notebooks)
        )

    words = f"There is no workbook in {out} (no {RECORD}): run `lmcore workbook --out {out}`, or name its folder."
    require((out / RECORD).exists(), words)
    remedy = "remove it and run the workbook again, which keeps what is done"
    plan = _read(out / RECORD, is_good, "scale, data and notebooks", remedy)
    given, shared = plan.get("parameters") or {}, {key: plan.get(key) for key in ("scale", "data", "environment")}
    items = [item for item in plan["notebooks"] if isinstance(item, dict)]
    old = {item["name"]: _record({**shared, "parameters": given.get(item["name"]), **item}) for item in items}
    names = [item if isinstance(item, str) else item["name"] for item in plan["notebooks"]]
    return {"scale": plan["scale"], "data": plan["data"], "notebooks": names, "old": old}


def read_record(out: str | os.PathLike) -> dict[str, Any]:
    """The plan with what became of its notebooks: {scale, data, parameters, environment, notebooks: [record, ...]}.

    A record of another scale or other data than the plan's is left out: its notebook was "not run". One that says
    "running" while nobody holds the notebook was "stopped" with its process. `environment` is the first notebook's.
    Folders made before every notebook had its own record are read as well. Raises `UserError` where there is no plan.
    """
    out = Path(out)
    plan, records = read_plan(out), []
    for name in plan["notebooks"]:
        record = plan["old"].get(name) or read_notebook_record(out, name)
        if record is None or (record.scale, record.data) != (plan["scale"], plan["data"]):
            record = NotebookRecord(name)
        if record.state == "running" and not is_held(out, name):
            record.state = "stopped"
        records.append(record)
    environments = (record.environment for record in records if record.state != "not run" and record.environment)
    return {
        "scale": plan["scale"],
        "data": plan["data"],
        "parameters": {record.name: record.parameters for record in records},
        "environment": next(environments, {}),
        "notebooks": [dataclasses.asdict(record) for record in records],
    }


def update_plan(out: str | os.PathLike, scale: str, data: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Adds notebooks to the plan in `out`; `known` are all notebooks of the project, in order.

    A plan of another scale or other data is replaced. Raises `UserError` if a notebook of that one is still running.
    """
    out = Path(out)
    refusal = f"Another process is writing to {out}; try again."
    with exclusive({out / ".workbook.lock": refusal}, PLAN_SECONDS):
        there = []
        if (out / RECORD).exists():
            before = read_plan(out)
            for name, record in before["old"].items():
                if not record_file(out, name).exists():
                    write_notebook_record(out, record)
            if (before["scale"], before["data"]) == (scale, data):
                there = before["notebooks"]
            for name in set(before["notebooks"]) - {*there, *names}:
                require(
                    not is_held(out, name),
                    f"Another process is running notebook {name} in {out} with scale {before['scale']} and data "
                    f"{before['data']}; wait for it or choose another OUT.",
                )
        planned = [name for name in known if name in {*there, *names}]
        write_json(out / RECORD, {"scale": scale, "data": data, "notebooks": planned})


@contextmanager
def exclusive(refusals: Mapping[Path, str], seconds: float) -> Iterator[None]:
    """Holds lock files for this process. Raises `UserError`, with its refusal, if another process holds one of them."""
    with contextlib.ExitStack() as stack:
        for file, refusal in refusals.items():
            stack.enter_context(locked(file, refusal, seconds))
        yield


def lock_file(out: Path, name: str) -> Path:
    """The file whose lock a process holds while it runs the notebook."""
    return out / "notebooks" / f".{name}.lock"


def holding(out: Path, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Holds notebooks for this process. Raises `UserError` naming the first that another one runs."""
    words = "Another process is running notebook {} in {}; wait for it or choose another OUT."
    return exclusive({lock_file(out, name): words.format(name, out) for name in names}, LOCK_SECONDS)


def is_held(out: Path, name: str) -> bool:
    """Whether a process runs the notebook at this moment."""
    return is_locked(lock_file(out, name))
