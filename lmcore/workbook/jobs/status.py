"""`lmcore jobs`: every job of an output folder, what became of it, what it is doing, and what its log says last.

Three sources are put together, each of which may be missing: Slurm, the job log, and the files that the work itself
writes. Where Slurm knows a job, its word counts; else the last line in the job log does. The files belong to processes
on other machines that write them at this moment, or died while they did: what cannot be read is left out.
"""

import glob
import json
import math
import os
import re
import socket
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lmcore.errors import FINISHED, UserError, require
from lmcore.workbook.jobs.log import (
    ENDED,
    LoggedJob,
    local_jobs_run,
    log_of,
    output_file,
    own_state,
    read_log,
    tail_lines,
)
from lmcore.workbook.jobs.site import load_site
from lmcore.workbook.jobs.slurm import QueueEntry, ask_slurm

WAITING = ("pending", "requeued", "configuring", "suspended")
SILENT_INTERVALS, SILENT_SECONDS = 10, 60
"""A run is silent that has not written for so many times its usual interval, and for so long."""

WIDTH = 120
COLUMNS = "{:<16.16}  {:<20.20}  {:<13.13}  {:<5}  {:<10}  "
"""Job, name, state, tries, left; what the job does has the rest of the line."""

NOTES = {
    "gave up": "It made no progress in several attempts, and was not requeued again.",
    "lost": "It was running on {host} when it last wrote, and nobody knows it any more.",
    "not run": "It never started, and Slurm does not know it any more.",
}


@dataclass
class JobStatus:
    """One row: a job, an array, or a task of an array that did not end well."""

    out: str
    id: str
    name: str
    kind: str
    state: str = "unknown"
    """Slurm's word in lower case, or: requeued (waits to resume), stopped, gave up, lost, not run, unknown."""
    attempts: int = 0
    """How often it was started."""
    doing: str = ""
    """Notebook and cell, training step and loss, or the tasks of an array by state."""
    seconds_left: float | None = None
    """Of the training run or array at hand, from the rate of this attempt; None: unknown."""
    notes: list[str] = field(default_factory=list)
    """Why it waits, how it ended."""
    log: str | None = None
    tail: list[str] = field(default_factory=list)
    """Last lines of the log."""
    tasks: dict[str, int] = field(default_factory=dict)
    """Of an array: how many tasks are in each state."""

    @property
    def is_active(self) -> bool:
        """Whether it runs now."""
        return self.state not in ENDED and self.state not in WAITING


def runs_folders() -> list[Path]:
    """Folders in which output folders lie by default: runs/ of the project, and of the site's scratch folder.

    Outside of a project it is lmcore's checkout, to which `lmcore submit` submits from there.
    """
    here = project = Path.cwd()
    if not (here / "runs").is_dir():
        from lmcore.workbook.parameters import find_project  # which takes seconds to import

        with suppress(UserError):
            project = find_project()
    found = [project / "runs"]
    with suppress(UserError):  # what `lmcore submit` refuses, it has not submitted with
        found.append(load_site(project / "papermill_jobs" / "site.yaml", None).folder(project) / "runs")
    return [Path(os.path.relpath(path)) if path.is_relative_to(here) else path for path in dict.fromkeys(found)]


def folders_with_jobs(runs: Path) -> list[Path]:
    """The folders in runs/ and runs/sweeps/ that jobs were submitted for."""
    return [path.parent for where in ("*", "sweeps/*") for path in sorted(runs.glob(f"{where}/jobs.log"))]


def status_of(outs: Sequence[Path], tail: int | None = None) -> tuple[list[JobStatus], str | None]:
    """A row for each job of the output folders, and a sentence if Slurm could not be asked about them.

    `tail` lines of each log are read; None: the last line of those that failed. Raises `UserError` for a folder that no
    job was submitted for.
    """
    require(tail is None or tail >= 0, f"--tail must be a number of lines from 0 on, not {tail}.")
    for out in outs:
        require(log_of(out).is_file(), f"No job was submitted for {out}: it has no jobs.log.")
    logged = {out: read_log(out) for out in outs}
    slurm, fault = ask_slurm([job.id for jobs in logged.values() for job in jobs if not job.is_local])
    rows = []
    for out, jobs in logged.items():
        works = [*read_notebooks(out), *read_runs(out)]
        for job in jobs:
            known = {id for id in slurm if id.partition("_")[0] == job.id}
            ids = sorted({*job.task_ids, *job.lines, *known}, key=lambda id: int("0" + id.partition("_")[2][:9]))
            tasks = [id for id in ids if re.fullmatch(r".*_\d+", id)]
            found = [row_of(out, job, id, slurm.get(id), fault is None, works) for id in tasks or ids[:1]]
            rows += [array_row(job, found), *(row for row in found if ended_badly(row))] if tasks else found
    for row in rows:
        if row.log and not row.tasks and (count := ended_badly(row) if tail is None else tail):
            row.tail = tail_lines(Path(row.log))[-count:]
    return rows, fault


def ended_badly(row: JobStatus) -> bool:
    """Whether the job has ended, and not with success."""
    return row.state in ENDED - {"completed"}


def row_of(
    out: Path, job: LoggedJob, id: str, entry: QueueEntry | None, answered: bool, works: Sequence["Work"]
) -> JobStatus:
    """A job or a task of an array."""
    lines = job.lines.get(id, [])
    values = {"host": None} | (lines[-1].values if lines else {})
    row = JobStatus(str(out), id, job.name, job.kind, own := own_state(lines))
    row.attempts = sum(line.state == "running" for line in lines)
    if entry is not None:
        row.state = "requeued" if entry.state == "pending" and row.attempts else entry.state
        row.state = own if own == "gave up" and entry.state in ENDED else row.state
    elif own == "running" and (is_gone(out, id, values["host"]) if job.is_local else answered):
        row.state = "lost"
    elif not lines and job.is_local and local_jobs_run(out):
        row.state = "pending"
    elif not lines and not job.is_local and not answered:
        row.state = "unknown"
    if entry is not None and entry.state in WAITING:
        reason = entry.reason or "no reason given"
        waits_for = f" for job {', '.join(job.after)}" if job.after and "Dependency" in reason else ""
        row.notes.append(f"It waits{waits_for}: {reason}{f'; expected to start {entry.start}' if entry.start else ''}.")
    if row.state in NOTES and not (row.state == "not run" and job.is_local):
        row.notes.append(NOTES[row.state].format(**values))
    if lines and lines[-1].state == "exit" and row.state != "completed" and values.get("code", "0") != "0":
        row.notes.append(f"It ended with exit code {values['code']}.")
    row.log = str(output_file(out.absolute(), job.name, id))
    if not job.task_ids:
        row.notes.append("It was submitted by hand.")
        found = [path for place in (out, Path.cwd()) for end in ("log", "out") for path in place.glob(f"*-{id}.{end}")]
        row.log = str(max(found, key=os.path.getmtime)) if found else None
    mine = [work for work in works if work.job in (id, job.id)]
    if row.is_active:
        runs = [work for work in mine if work.state == "training"]
        words = [work.words for work in (*(work for work in mine if work.state == "running"), *runs[:1])]
        if len(runs) > 1:
            words.append(f"{len(runs) - 1} more run{'s' if len(runs) > 2 else ''}")
        row.doing, row.seconds_left = "; ".join(words), runs[0].seconds_left if len(runs) == 1 else None
    elif row.attempts:
        row.doing = "; ".join(work.words for work in mine if work.state in ("failed", "stopped"))
    return row


def is_gone(out: Path, id: str, host: str | None) -> bool:
    """Whether a local job of `out` has no process any more; unknown, thus not, on another host than this."""
    if host not in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return False
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            own = process.environ()
            mine = (own.get("LMCORE_JOB_ID"), own.get("OUT")) == (id, str(out.resolve()))
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def array_row(job: LoggedJob, tasks: Sequence[JobStatus]) -> JobStatus:
    """All tasks of an array in one row, with counts by state and the time left at the pace of the tasks so far."""
    counts = Counter(task.state for task in tasks)
    going = [task for task in tasks if task.is_active]
    unfinished = [task.state for task in tasks if task.state not in ENDED]
    others = [state for state, _ in counts.most_common() if state != "completed"]
    row = JobStatus(tasks[0].out, job.id, job.name, job.kind, tasks=dict(counts))
    row.state = [*(task.state for task in going), *unfinished, *others, "completed"][0]  # what goes on, what went wrong
    row.attempts = max(task.attempts for task in tasks)
    words = [f"{counts['completed']}/{len(tasks)} tasks done", *(f"{counts[state]} {state}" for state in others)]
    row.doing = ", ".join([*words, *(task.doing for task in going[:1] if task.doing)])
    row.notes = [*dict.fromkeys(note for task in tasks if task.state in WAITING for note in task.notes)][:2]
    row.log = str(output_file(Path(row.out).absolute(), job.name, f"{job.id}_*")) if job.task_ids else None
    durations = []
    for task in tasks:
        times = {line.state: line.time_utc for line in job.lines.get(task.id, [])}  # the last of each
        with suppress(KeyError, ValueError, TypeError):  # a time that is none
            if task.state == "completed":
                began, ended = (datetime.fromisoformat(times[state]) for state in ("running", "exit"))
                durations.append((ended - began).total_seconds())
    if len(durations) > 1 and going:
        row.seconds_left = statistics.median(durations) * len(unfinished) / len(going)
    return row


# ---- what jobs are doing, from the files of notebooks and training runs


class Work(NamedTuple):
    """A notebook or a training run in the hands of a job."""

    job: str | None
    """The job that last worked on it."""
    state: str
    """Of a notebook, as its record has it; training."""
    words: str
    """How far it is."""
    seconds_left: float | None = None
    """Of a run; None where no rate is known."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return value if isinstance(value, dict) else {}
    return {}


def read_notebooks(out: Path) -> list[Work]:
    """The notebooks that were started in the output folder, in their order: 02_train, cell 3/5."""
    found = []
    for path in sorted((out / "notebooks").glob("*.json")):
        record, ended = read_object(path), []
        with suppress(AttributeError, KeyError, TypeError):  # some other JSON
            for cell in read_object(path.with_suffix(".ipynb"))["cells"]:
                if cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", []):
                    ended.append(cell["metadata"].get("papermill", {}).get("status") in ("completed", "failed"))
        state = str(record.get("state"))
        cell = record.get("cell") or (ended.index(False) + 1 if False in ended else len(ended))
        words = path.stem if state == "running" else f"{path.stem} {state} at"
        words += f"{',' if state == 'running' else ''} cell {cell}/{len(ended)}" if ended else ""
        found.append(Work(record.get("job"), state, words))
    return found


def read_runs(out: Path) -> list[Work]:
    """The training runs that go on in the output folder, the one that was last written to first."""
    places = (out / file for file in glob.glob("**/status.json", root_dir=out, recursive=True))
    runs = {path.parent: status for path in places if (status := read_object(path)).get("state") == "running"}
    return [read_run(folder, runs[folder]) for folder in sorted(runs, key=last_written, reverse=True)]


def last_written(run: Path) -> float:
    """When a run wrote its last line, in seconds since the epoch."""
    for name in ("metrics.jsonl", "status.json"):
        with suppress(OSError):
            return (run / name).stat().st_mtime
    return 0.0


def read_run(folder: Path, status: dict[str, Any]) -> Work:
    """One run that goes on, with its step, loss and rate since it was last started: as far as its files tell."""
    start = step = status["step"] if isinstance(status.get("step"), int) else 0
    steps = read_object(folder / "config.json").get("steps")
    lines, own = [], []  # step, seconds, loss: of all lines, and of those of this attempt
    for text in tail_lines(folder / "metrics.jsonl"):
        with suppress(ValueError, KeyError, TypeError, RecursionError, OverflowError):
            line = (value := json.loads(text))["step"], float(value["seconds"]), float(value["train_loss"])
            if isinstance(line[0], int) and math.isfinite(sum(line)):
                step = line[0]
                lines.append(line)
                own += [line] if step > start else []
    seconds = own[-1][1] - own[0][1] if own else 0.0
    rate = (own[-1][0] - own[0][0]) / seconds if seconds > 0 else 0.0
    words = [f"step {step:,}/{steps:,}" if isinstance(steps, int) else f"step {step:,}"]
    words += [f"loss {lines[-1][2]:.3f}"] if lines else []
    words += [f"{rate:.3g} steps/s"] if rate > 0 else []
    left, silent = None, time.time() - last_written(folder)
    if silent > max(SILENT_SECONDS, SILENT_INTERVALS * seconds / max(len(own) - 1, 1)):
        words.append(f"nothing new for {in_words(silent)}")
    elif rate > 0 and isinstance(steps, int):
        left = max(0.0, (steps - step) / rate - silent)
    name, others = folder.name, read_object(folder.parent / "sweep.json")
    if name in others:
        done = sum(read_object(folder.parent / other / "status.json").get("state") in FINISHED for other in others)
        name += f" ({folder.parent.name} {done}/{len(others)} done)"
    return Work(status.get("job"), "training", f"{name}: {', '.join(words)}", left)


# ---- the table


def as_text(rows: Sequence[JobStatus], fault: str | None) -> str:
    """A table for each output folder; below a job's row what there is to say of it, its log, and the log's end."""
    lines = [fault] if fault else []
    for out in dict.fromkeys(row.out for row in rows):
        lines += [""] * bool(lines) + [out, COLUMNS.format("JOB", "NAME", "STATE", "TRIES", "LEFT") + "DOING"]
        for row in (row for row in rows if row.out == out):
            left = "unknown" if row.seconds_left is None else in_words(row.seconds_left)
            head = COLUMNS.format(row.id, row.name, row.state, row.attempts or "", left if row.is_active else "")
            lines += wrapped(row.doing, head, " " * len(head)) or [head]
            lines += [line for note in row.notes for line in wrapped(note, "    ", "    ")]
            if row.log:
                lines.append(f"    log: {row.log}")  # whole, also where it is longer than the line: it is to be copied
            lines += [line for text in row.tail for line in wrapped(text, "    | ", "    | ", max_lines=3)]
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str, first: str, others: str, **options: Any) -> list[str]:
    """The lines of a text in the table, with what stands before them."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, placeholder=" …", **options)


def in_words(seconds: float) -> str:
    """A duration: 0:04:05, 2-3:00:00."""
    return re.sub(r" days?, ", "-", str(timedelta(seconds=min(round(seconds), 10**9))))


def as_json(rows: Sequence[JobStatus], fault: str | None) -> str:
    """Everything that the rows hold: {"slurm": null or why it could not be asked, "jobs": [...]}."""
    return json.dumps({"slurm": fault, "jobs": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False)
