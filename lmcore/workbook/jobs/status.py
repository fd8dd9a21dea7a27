"""`lmcore jobs`: every job of an output folder, what became of it, what it is doing, and what its log says last.

Three sources are put together, each of which may be missing: Slurm, the job log, and the files that the work itself
writes. Where Slurm knows a job, its word counts; else the last line in the job log does.
"""

import json
import os
import re
import socket
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

import psutil

from lmcore.errors import UserError, require
from lmcore.text import ANSI_ESCAPE
from lmcore.workbook.jobs.log import ENDED, LoggedJob, local_jobs_run, log_of, output_file, own_state, read_log
from lmcore.workbook.jobs.progress import Work, format_duration, read_notebooks, read_runs, tail_text
from lmcore.workbook.jobs.site import load_site
from lmcore.workbook.jobs.slurm import QueueEntry, ask_slurm

WAITING = ("pending", "requeued", "configuring", "suspended")
WIDTH = 120
COLUMNS = {"job": 16, "name": 20, "state": 13, "tries": 5, "left": 10}
"""Columns of the table and their widths; what the job does has the rest of the line."""

TAIL_LINES = 3
"""So many lines of the table a line of a log has at most."""


@dataclass(frozen=True)
class JobStatus:
    """One row: a job, an array, or a task of an array that did not end well."""

    out: str
    id: str
    name: str
    kind: str
    state: str
    """Slurm's word in lower case, or: requeued (waits to go on), stopped, gave up, lost, not run, unknown."""
    attempts: int = 0
    """How often it was started."""
    doing: str = ""
    """Notebook and cell, training step and loss, or the tasks of an array by state."""
    seconds_left: float | None = None
    """Of the training run or array at hand, from the rate of this attempt; None: unknown."""
    notes: tuple[str, ...] = ()
    """Why it waits, how it ended."""
    log: str | None = None
    tail: tuple[str, ...] = ()
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
    here = Path.cwd()
    project = next((folder for folder in (here, *here.parents) if (folder / "papermill_jobs").is_dir()), None)
    if project is None and not (here / "runs").is_dir():
        from lmcore.workbook.parameters import find_project  # which imports a package that is slow to import

        with suppress(UserError):
            project = find_project()
    project = project or here
    found = [project / "runs"]
    with suppress(UserError):  # what `lmcore submit` refuses, it has not submitted with
        found.append(load_site(project / "papermill_jobs" / "site.yaml", None).folder(project) / "runs")
    return [Path(os.path.relpath(path)) if path.is_relative_to(here) else path for path in dict.fromkeys(found)]


def folders_with_jobs(runs: Path) -> list[Path]:
    """The folders in runs/ and runs/sweeps/ that jobs were submitted for."""
    name = log_of("").name
    return [path.parent for path in (*sorted(runs.glob(f"*/{name}")), *sorted(runs.glob(f"sweeps/*/{name}")))]


def status_of(outs: Sequence[Path], tail: int | None = None) -> tuple[list[JobStatus], str | None]:
    """A row for each job of the output folders, and a sentence if Slurm could not be asked about them.

    `tail` lines of each log are read; None: the last line of those that failed. Raises `UserError` for a folder that no
    job was submitted for.
    """
    require(tail is None or tail >= 0, f"--tail must be a number of lines from 0 on, not {tail}.")
    for out in outs:
        require(log_of(out).is_file(), f"No job was submitted for {out}: it has no jobs.log.")
    logged = [(out, job) for out in outs for job in read_log(out)]
    slurm, fault = ask_slurm([job.id for _, job in logged if not job.is_local])
    work = {out: (read_notebooks(out), read_runs(out)) for out in outs}
    rows = [row for out, job in logged for row in rows_of(out, job, slurm, fault is None, *work[out])]
    return [with_tail(row, tail) for row in rows], fault


def rows_of(
    out: Path,
    job: LoggedJob,
    slurm: dict[str, QueueEntry],
    answered: bool,
    notebooks: Sequence[Work],
    runs: Sequence[Work],
) -> list[JobStatus]:
    """The row of a job; of an array a row for all tasks, and one for each that did not end well."""
    entries = {id: entry for id, entry in slurm.items() if id.partition("_")[0] == job.id}
    ids = sorted({*job.task_ids, *job.lines, *entries}, key=lambda id: int("0" + id.partition("_")[2][:9]))
    tasks = [id for id in ids if re.fullmatch(r".*_\d+", id)]
    rows = {id: row_of(out, job, id, entries.get(id), answered) for id in tasks or ids[:1]}
    rows = {id: with_work(row, job, notebooks, runs) for id, row in rows.items()}
    if not tasks:
        return list(rows.values())
    return [row_of_array(out, job, rows), *(row for row in rows.values() if row.state in ENDED - {"completed"})]


def row_of(out: Path, job: LoggedJob, id: str, entry: QueueEntry | None, answered: bool) -> JobStatus:
    """A job or a task of an array, without what it is doing."""
    lines, notes = job.lines.get(id, []), []
    attempts = sum(line.state == "running" for line in lines)
    own, last = own_state(lines), lines[-1] if lines else None
    state = entry.state if entry else own
    if state == "pending" and attempts:
        state = "requeued"
    elif own == "gave up" and state in ENDED:
        state = own
        notes.append("It made no progress in several attempts, and was not requeued again.")
    elif entry is None and own == "running" and (is_gone(id, last.values.get("host")) if job.is_local else answered):
        state = "lost"
        notes.append(f"It was running on {last.values.get('host')} when it last wrote, and nobody knows it any more.")
    elif entry is None and not lines:
        state = ("pending" if local_jobs_run(out) else own) if job.is_local else own if answered else "unknown"
        if state == own and not job.is_local:
            notes.append("It never started, and Slurm does not know it any more.")
    if entry is not None and entry.state in WAITING:
        reason = entry.reason or "no reason given"
        waits_for = f" for job {', '.join(job.after)}" if job.after and "Dependency" in reason else ""
        notes.append(f"It waits{waits_for}: {reason}{f'; expected to start {entry.start}' if entry.start else ''}.")
    if last is not None and last.state == "exit" and state != "completed" and last.values.get("code", "0") != "0":
        notes.append(f"It ended with exit code {last.values['code']}.")
    if not job.task_ids:
        notes.append("It was submitted by hand.")
        places = [path for place in (out, Path.cwd()) for path in place.glob(f"*-{id}.*")]
        log = max((path for path in places if path.suffix in (".log", ".out")), key=os.path.getmtime, default=None)
    else:
        log = output_file(out.absolute(), job.name, id)
    return JobStatus(str(out), id, job.name, job.kind, state, attempts, notes=tuple(notes), log=log and str(log))


def is_gone(id: str, host: str | None) -> bool:
    """Whether a local job has no process any more; unknown, thus not, on another host than this."""
    if host not in (socket.gethostname(), socket.gethostname().split(".")[0]):
        return False
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("LMCORE_JOB_ID") == id and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def with_work(row: JobStatus, job: LoggedJob, notebooks: Sequence[Work], runs: Sequence[Work]) -> JobStatus:
    """The row with what the job's notebooks and runs tell: what they do, or at which cell they ended."""

    def is_mine(work: Work, otherwise: bool) -> bool:
        return work.job in (row.id, job.id) if work.job is not None else otherwise

    by_name = job.kind != "notebook"
    mine = [each for each in notebooks if is_mine(each, by_name or each.name == job.name)]
    if not row.is_active:
        ended = [each.words for each in mine if each.state in ("failed", "stopped")] if row.attempts else []
        return replace(row, doing="; ".join(ended))
    began = max((seconds_of(line.time_utc) for line in job.lines.get(row.id, [])), default=0.0)
    going = [run for run in runs if run.state == "running" and is_mine(run, run.changed >= began)]
    words = [each.words for each in mine if each.state == "running"] + [run.words for run in going[:1]]
    if len(going) > 1:
        words.append(f"{len(going) - 1} more run{'s' if len(going) > 2 else ''}")
    return replace(row, doing="; ".join(words), seconds_left=going[0].seconds_left if len(going) == 1 else None)


def seconds_of(time_utc: str) -> float:
    """An ISO time as seconds since the epoch, 0 if it is none."""
    with suppress(ValueError):
        return datetime.fromisoformat(time_utc).timestamp()
    return 0.0


def row_of_array(out: Path, job: LoggedJob, rows: dict[str, JobStatus]) -> JobStatus:
    """All tasks of an array in one row, with counts by state and the time left at the pace of the tasks so far."""
    counts = Counter(row.state for row in rows.values())
    going = [row for row in rows.values() if row.is_active]
    words = [f"{counts['completed']}/{len(rows)} tasks done"]
    words += [f"{count} {state}" for state, count in counts.most_common() if state != "completed"]
    waits = [note for row in rows.values() if row.state in WAITING for note in row.notes]
    unfinished = [row.state for row in rows.values() if row.state not in ENDED]
    others = [state for state, _ in counts.most_common() if state != "completed"]  # what goes on, else what went wrong
    durations = []
    for id in rows:
        times = {line.state: seconds_of(line.time_utc) for line in job.lines.get(id, [])}  # the last of each
        if rows[id].state == "completed" and {"running", "exit"} <= times.keys():
            durations.append(times["exit"] - times["running"])
    left = statistics.median(durations) * len(unfinished) / len(going) if len(durations) > 1 and going else None
    return JobStatus(
        out=str(out),
        id=job.id,
        name=job.name,
        kind=job.kind,
        state=[*(row.state for row in going), *unfinished, *others, "completed"][0],
        attempts=max(row.attempts for row in rows.values()),
        doing=", ".join([*words, *(row.doing for row in going[:1] if row.doing)]),
        seconds_left=left,
        notes=tuple(dict.fromkeys(waits))[:2],
        log=str(output_file(out.absolute(), job.name, f"{job.id}_*")) if job.task_ids else None,
        tasks=dict(counts),
    )


def with_tail(row: JobStatus, lines: int | None) -> JobStatus:
    """The row with the last lines of its log; None: one, if it did not end well."""
    if lines is None:
        lines = int(row.state in ENDED - {"completed"})
    if not row.log or not lines or row.tasks:
        return row
    text = ANSI_ESCAPE.sub("", tail_text(Path(row.log))).replace("\r\n", "\n")
    said = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return replace(row, tail=tuple([line for line in said if line][-lines:]))


def as_text(rows: Sequence[JobStatus], fault: str | None) -> str:
    """A table for each output folder; below a job's row what there is to say of it, its log, and the log's end."""
    lines = [fault] if fault else []
    for out in dict.fromkeys(row.out for row in rows):
        head = "  ".join(f"{name.upper():<{width}}" for name, width in COLUMNS.items())
        lines += [""] * bool(lines) + [out, f"{head}  DOING"]
        lines += [line for row in rows if row.out == out for line in lines_of(row)]
    return "\n".join(line.rstrip() for line in lines)


def lines_of(row: JobStatus) -> list[str]:
    """A job's lines."""
    left = "unknown" if row.seconds_left is None else format_duration(row.seconds_left)
    values = (row.id, row.name, row.state, str(row.attempts or ""), left if row.is_active else "")
    cells = [
        f"{value if len(value) <= width else f'{value[: width - 1]}…':<{width}}  "
        for value, width in zip(values, COLUMNS.values(), strict=True)
    ]
    head = "".join(cells)
    lines = textwrap.wrap(row.doing, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head]
    for note in row.notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    if row.log:
        lines.append(f"    log: {row.log}")  # whole, also where it is longer than the line: it is to be copied
    for line in row.tail:
        parts = textwrap.wrap(line, WIDTH - 6, max_lines=TAIL_LINES, placeholder=" …")
        lines += [f"    | {part}" for part in parts]
    return lines


def as_json(rows: Sequence[JobStatus], fault: str | None) -> str:
    """Everything that the rows hold: {"slurm": null or why it could not be asked, "jobs": [...]}."""
    return json.dumps({"slurm": fault, "jobs": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False)
