"""`lmcore jobs`: every job of an output folder, what became of it, what it is doing, and what its log says last.

Three sources are put together, each of which may be missing: Slurm, the ledger in OUT/jobs/, and the files that the
work itself writes. Where Slurm knows a job, its word counts; else the last line of the job's own state file does.
"""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmcore.errors import EXIT_INTERRUPTED, require
from lmcore.text import ANSI_ESCAPE
from lmcore.workbook.jobs.found import Job, is_gone, local_jobs_run, read_ledger, this_attempt
from lmcore.workbook.jobs.ledger import JobRecord, StateLine, jobs_folder, natural
from lmcore.workbook.jobs.progress import (
    NotebookProgress,
    RunProgress,
    describe_run,
    read_notebooks,
    read_runs,
    seconds_of,
    tail_text,
)
from lmcore.workbook.jobs.queue import QueueEntry, ask_slurm, whole

WAITING = ("pending", "requeued", "configuring", "suspended")
ACTIVE = ("running", "completing")
ENDED_WELL = ("completed",)


@dataclass(frozen=True)
class JobStatus:
    """One row: a job, an array, or a task of an array that did not end well."""

    out: str
    id: str
    name: str
    kind: str
    state: str
    """Slurm's word in lower case, or: requeued (waits to go on), stopped, gave up, lost, damaged, unknown."""
    attempts: int = 0
    """How often it was started."""
    doing: str = ""
    """Notebook and cell, training step and loss, or the tasks of an array by state."""
    seconds_left: float | None = None
    """Of the training run or array at hand, from the rate of this attempt; None: unknown."""
    notes: tuple[str, ...] = ()
    """Why it waits, how it ended, what is wrong with its files."""
    log: str | None = None
    tail: tuple[str, ...] = ()
    """Last lines of the log."""
    tasks: dict[str, int] = field(default_factory=dict)
    """Of an array: how many tasks are in each state."""


def status_of(outs: Sequence[Path], tail: int | None = None) -> tuple[list[JobStatus], str | None]:
    """A row for each job of the output folders, and a sentence if Slurm could not be asked about them.

    `tail` lines of each log are read; None: the last line of those that failed. Raises `UserError` for a folder that no
    job was submitted for.
    """
    require(tail is None or tail >= 0, f"--tail must be a number of lines from 0 on, not {tail}.")
    found: list[tuple[Path, list[Job], dict[str, str]]] = []
    for out in outs:
        require(jobs_folder(out).is_dir(), f"No job was submitted for {out}: it has no folder jobs/.")
        found.append((out, *read_ledger(out)))
    asked = [job.id for _, jobs, _ in found for job in jobs if not job.is_local]
    slurm, fault = ask_slurm(asked)
    rows = []
    for out, jobs, damaged in found:
        notebooks, runs = read_notebooks(out), read_runs(out)
        for id, fault_of_record in damaged.items():
            rows.append(JobStatus(str(out), id, "?", "unknown", "damaged", notes=(fault_of_record,)))
        for job in jobs:
            rows += rows_of(job, slurm, fault is None, notebooks, runs)
    return [with_tail(row, tail) for row in rows], fault


def rows_of(
    job: Job,
    slurm: dict[str, QueueEntry],
    answered: bool,
    notebooks: Sequence[NotebookProgress],
    runs: Sequence[RunProgress],
) -> list[JobStatus]:
    """The row of a job; of an array a row for all tasks, and one for each that did not end well."""
    entries = {id: entry for id, entry in slurm.items() if whole(id) == job.id}
    planned = job.record.task_ids if job.record else []
    ids = sorted({*planned, *job.lines, *entries} or {job.id}, key=lambda id: natural(id.rpartition("_")[2]))
    is_array = (job.record is not None and job.record.tasks is not None) or any("_" in id for id in ids)
    if is_array:
        ids = [id for id in ids if "_" in id]
    rows = {id: row_of(job, id, entries.get(id), answered) for id in ids}
    rows = {id: with_work(row, job, notebooks, runs) for id, row in rows.items()}
    if not is_array:
        return list(rows.values())
    bad = [row for row in rows.values() if row.state not in (*WAITING, *ACTIVE, *ENDED_WELL)]
    return [row_of_array(job, rows), *bad]


def row_of(job: Job, id: str, entry: QueueEntry | None, answered: bool) -> JobStatus:
    """A job or a task of an array, without what it is doing."""
    lines, record = job.lines.get(id, []), job.record
    attempts = sum(line.state == "running" for line in lines)
    state, notes = entry.state if entry else own_state(job, id, lines, answered), []
    if state == "pending" and attempts:
        state = "requeued"
    last, attempt = lines[-1] if lines else None, this_attempt(lines)
    if "gave up" in attempt and state not in (*WAITING, *ACTIVE):
        state = "gave up"
        notes.append("It made no progress in several attempts, and was not requeued again.")
    if entry is not None and entry.state in WAITING:
        notes += why_it_waits(entry, record)
    if state == "lost":
        notes.append(f"It was running on {last.host} when it last wrote, and nobody knows it any more.")
    if last is not None and last.state == "exit" and last.code not in (0, None) and state not in ENDED_WELL:
        notes.append(f"It ended with exit code {last.code}.")
    name = record.name if record else entry.name if entry and entry.name else "?"
    if record is None:
        notes.append("It was submitted by hand.")
    log = log_of(job, id, name)
    kind = record.kind if record else "unknown"
    return JobStatus(str(job.out), id, name, kind, state, attempts, notes=tuple(notes), log=log and str(log))


def own_state(job: Job, id: str, lines: Sequence[StateLine], answered: bool) -> str:
    """The state by the job's own words, where Slurm does not know it, or (not `answered`) was not asked."""
    if not lines:
        return "unknown" if not job.is_local else "pending" if local_jobs_run(job.out) else "not run"
    last = lines[-1]
    if "gave up" in this_attempt(lines):
        return "gave up"
    if last.state == "exit":
        return {0: "completed", EXIT_INTERRUPTED: "stopped"}.get(last.code, "failed")
    if last.state == "running" and (answered if not job.is_local else is_gone(id, last.host)):
        return "lost"
    return last.state


def why_it_waits(entry: QueueEntry, record: JobRecord | None) -> list[str]:
    """Slurm's reason, and when it expects to start the job."""
    reason = entry.reason or "no reason given"
    waits_for = f" for job {', '.join(record.after)}" if record and record.after and "Dependency" in reason else ""
    start = f"; expected to start {entry.start}" if entry.start else ""
    return [f"It waits{waits_for}: {reason}{start}."]


def log_of(job: Job, id: str, name: str) -> Path | None:
    """Path of a job's log: from the ledger, else a file that is named like one."""
    if job.record is not None:
        task = id.partition("_")[2]
        return job.record.log_file(int(task) if task.isdigit() else None)
    places = (jobs_folder(job.out), job.out, Path.cwd())
    found = [path for place in places for path in place.glob(f"*-{id}.*") if path.suffix in (".log", ".out")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def with_work(
    row: JobStatus, job: Job, notebooks: Sequence[NotebookProgress], runs: Sequence[RunProgress]
) -> JobStatus:
    """The row with what the job's notebooks and runs tell."""
    mine = [each for each in notebooks if belongs(each, row, job)]
    if row.state not in ACTIVE:
        failed = [each for each in mine if each.state in ("failed", "stopped")] if row.attempts else []
        words = [f"{each.name} {each.state} at cell {each.cell}/{each.cells}" for each in failed]
        return replace(row, doing="; ".join(words))
    active = [each for each in mine if each.state == "running"]
    words = [f"{each.name}, cell {each.cell}/{each.cells}" if each.cell else each.name for each in active]
    began = max((seconds_of(line.time_utc) or 0.0 for line in job.lines.get(row.id, [])), default=0.0)
    going = [run for run in runs if run.state == "running" and is_run_of(run, row, began)]
    words += [describe_run(run) for run in going[:1]]
    if len(going) > 1:
        words.append(f"{len(going) - 1} more run{'s' if len(going) > 2 else ''}")
    return replace(row, doing="; ".join(words), seconds_left=going[0].seconds_left if len(going) == 1 else None)


def belongs(notebook: NotebookProgress, row: JobStatus, job: Job) -> bool:
    """Whether the job works, or worked, on this notebook."""
    if notebook.job is not None:
        return notebook.job in (row.id, whole(row.id))
    return job.record is None or not job.record.notebooks or notebook.name in job.record.notebooks


def is_run_of(run: RunProgress, row: JobStatus, began: float) -> bool:
    """Whether the job trains this run: it says so, or it was written to since the job began."""
    return run.job in (row.id, whole(row.id)) if run.job is not None else run.changed >= began


def row_of_array(job: Job, rows: dict[str, JobStatus]) -> JobStatus:
    """All tasks of an array in one row, with counts by state."""
    counts = Counter(row.state for row in rows.values())
    done = counts["completed"]
    going = [row for row in rows.values() if row.state in ACTIVE]
    states = [f"{count} {state}" for state, count in counts.most_common() if state != "completed"]
    doing = ", ".join([f"{done}/{len(rows)} tasks done", *states, *(row.doing for row in going[:1] if row.doing)])
    waits = [note for row in rows.values() if row.state in WAITING for note in row.notes]
    ended = next(iter(rows.values()), None)
    return JobStatus(
        out=str(job.out),
        id=job.id,
        name=ended.name if ended else "?",
        kind=job.record.kind if job.record else "unknown",
        state=state_of_array(counts),
        attempts=max((row.attempts for row in rows.values()), default=0),
        doing=doing,
        seconds_left=array_seconds_left(job, rows, len(going)),
        notes=tuple(dict.fromkeys(waits))[:2],
        log=str(job.record.log_file()) if job.record else None,
        tasks=dict(counts),
    )


def state_of_array(counts: Counter[str]) -> str:
    """One word for many tasks: what still goes on comes first, then what went wrong."""
    for state in (*ACTIVE, *WAITING):
        if counts[state]:
            return state
    bad = [state for state, _ in counts.most_common() if state not in ENDED_WELL]
    return bad[0] if bad else "completed"


def array_seconds_left(job: Job, rows: dict[str, JobStatus], running: int) -> float | None:
    """From the median duration of tasks that are done, shared by as many as run now; None where nothing tells."""
    durations = []
    for id, row in rows.items():
        lines = job.lines.get(id, [])
        starts = [seconds_of(line.time_utc) for line in lines if line.state == "running"]
        ends = [seconds_of(line.time_utc) for line in lines if line.state == "exit"]
        if row.state == "completed" and starts and ends and starts[-1] is not None and ends[-1] is not None:
            durations.append(ends[-1] - starts[-1])
    remaining = sum(row.state in (*WAITING, *ACTIVE) for row in rows.values())
    return statistics.median(durations) * remaining / running if len(durations) >= 2 and running else None


def with_tail(row: JobStatus, lines: int | None) -> JobStatus:
    """The row with the last lines of its log; None: one, if it did not end well."""
    if lines is None:
        lines = int(row.state not in (*WAITING, *ACTIVE, *ENDED_WELL))
    if not row.log or not lines or row.tasks:
        return row
    text = ANSI_ESCAPE.sub("", tail_text(Path(row.log)))
    said = [line.rpartition("\r")[2].rstrip() for line in re.split(r"\n", text.replace("\r\n", "\n"))]
    return replace(row, tail=tuple([line for line in said if line][-lines:]))
