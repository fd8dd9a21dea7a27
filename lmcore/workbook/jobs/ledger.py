"""What was submitted for an output folder, and what its jobs said of themselves: OUT/jobs/.

`<id>.json` is written once, when a job is submitted. `<id>.state` (`<id>_<task>.state` for an array) is appended to by
the job itself, see papermill_jobs/job.sh, so that what became of it can be read where the scheduler has forgotten it.
"""

import os
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from lmcore.config import from_dict, require_choices
from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json

ID = {"slurm": re.compile(r"[0-9]+"), "local": re.compile(r"local-[0-9]+")}
"""What an id looks like, by scheduler."""

Kind = Literal["workbook", "notebook", "writeup", "sweep", "sweep-table"]


@dataclass(frozen=True)
class JobRecord:
    """One job as it was submitted."""

    id: str
    """Slurm's job id, that of the whole array for an array; local jobs have ids that begin with "local-"."""
    name: str
    kind: Kind
    script: str
    """Path of the rendered script, relative to the output folder."""
    log: str
    """Absolute path of the log, in which %j, %A and %a stand for job, array and task, as in Slurm, and %% for %."""
    submitted_utc: str
    after: list[str] = field(default_factory=list)
    """Ids of the jobs that it waits for."""
    notebooks: list[str] = field(default_factory=list)
    tasks: list[int] | None = None
    """Indices of an array; None: not an array."""
    scheduler: Literal["slurm", "local"] = "slurm"

    def __post_init__(self):
        require_choices(self)
        for name, kind in {"after": str, "notebooks": str, "tasks": int}.items():
            values = [] if name == "tasks" and self.tasks is None else getattr(self, name)
            whole = isinstance(values, list) and all(type(value) is kind for value in values)
            require(whole, f"{name} must be a list of {'numbers' if kind is int else 'names'}, not {values!r}.")

    @property
    def task_ids(self) -> list[str]:
        """Names under which it, or each task of the array, writes its state: "17", or "17_0", "17_1", ..."""
        return [self.id] if self.tasks is None else [f"{self.id}_{task}" for task in self.tasks]

    def log_file(self, task: int | None = None) -> Path:
        """Path of the log of the job, or of one task of the array; with * for those of all its tasks."""
        words = {"%j": self.id, "%A": self.id, "%a": "*" if task is None else str(task), "%%": "%"}
        return Path(re.sub("%[jAa%]", lambda found: words[found[0]], self.log))


@dataclass(frozen=True)
class StateLine:
    """One line that a job appended to its state file."""

    job: str
    """The job's id; "17_3" for a task of an array."""
    time_utc: str
    state: str
    """running, requeued, gave up, exit, or cancelled: what it waited for failed, so that it never ran."""
    host: str | None = None
    restart: int | None = None
    """How often the job had been started before; only with "running"."""
    code: int | None = None
    """Exit code; only with "exit"."""


def jobs_folder(out: str | os.PathLike) -> Path:
    """Folder with the scripts, records, states and logs of the jobs of an output folder."""
    return Path(out) / "jobs"


def write_job(out: str | os.PathLike, record: JobRecord) -> Path:
    """Writes the record of a job that has just been submitted."""
    path = jobs_folder(out) / f"{record.id}.json"
    write_json(path, asdict(record))
    return path


def append_state(out: str | os.PathLike, job: str, state: str) -> None:
    """Adds a line to what a job says of itself, with the time before it. Raises `UserError` if it cannot be written."""
    folder = jobs_folder(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{job}.state", "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {state}\n")
    except OSError as error:
        raise UserError(f"Cannot write {folder / f'{job}.state'}: {error.strerror or error}.") from error


def read_jobs(out: str | os.PathLike) -> list[JobRecord]:
    """All jobs of an output folder, the first submitted first. Raises `UserError` naming a record that is damaged."""
    records = [read_job(path) for path in record_files(out)]
    return sorted(records, key=lambda record: (record.submitted_utc, natural(record.id)))


def record_files(out: str | os.PathLike) -> list[Path]:
    """Files of the records of an output folder's jobs."""
    return [path for path in jobs_folder(out).glob("*.json") if not path.name.endswith(".progress.json")]


def read_job(path: Path) -> JobRecord:
    """The record of one job. Raises `UserError` naming a file that is damaged."""
    try:
        values: Any = read_json(path)
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; remove it to go on without.") from None
    needed = {"id", "name", "kind", "script", "log", "submitted_utc"}
    whole = isinstance(values, dict) and needed <= values.keys()
    require(whole, f"{path} is not the record of a job; remove it to go on without.")
    try:
        record = from_dict(JobRecord, values)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error} Remove it to go on without.") from None
    named = record.id == path.stem and ID[record.scheduler].fullmatch(record.id)
    require(bool(named), f"{path} is damaged: it cannot be of job {record.id!r}. Remove it to go on without.")
    return record


def natural(job: str) -> tuple[int, str]:
    """Key that sorts ids by their number: local-9 before local-10."""
    digits = "".join(letter for letter in job if letter.isdigit())
    return int(digits or 0), job


def states(out: str | os.PathLike, job: str) -> list[StateLine]:
    """What a job ("17"), or one task of an array ("17_3"), said of itself, oldest first.

    For the id of a whole array: the lines of all its tasks, by time. A line that a crash has cut off is left out.
    """
    folder = jobs_folder(out)
    own = folder / f"{job}.state"
    files = [own] if own.exists() else sorted(folder.glob(f"{job}_*.state"))
    lines = [line for file in files for line in read_states(file)]
    return sorted(lines, key=lambda line: line.time_utc)


def read_states(file: Path) -> list[StateLine]:
    """The whole lines of one state file."""
    found = []
    try:
        content = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from error
    for text in content.splitlines():
        match text.split():
            case [time, "running", host, "restart", number] if number.isdecimal():
                found.append(StateLine(file.stem, time, "running", host=host, restart=int(number)))
            case [time, "exit", number] if number.isdecimal():
                found.append(StateLine(file.stem, time, "exit", code=int(number)))
            case [time, "requeued" | "cancelled" as state]:
                found.append(StateLine(file.stem, time, state))
            case [time, "gave", "up"]:
                found.append(StateLine(file.stem, time, "gave up"))
    return found
