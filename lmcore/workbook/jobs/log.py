"""OUT/jobs.log: a line for each state of each job, by `lmcore submit` and by the job itself (papermill_jobs/job.sh).

    2026-11-22T18:00:00+00:00 17 02_train submitted kind=notebook after=15,16
    2026-11-22T18:02:11+00:00 17 02_train running host=n1 restart=0
    2026-11-22T22:00:09+00:00 17 02_train requeued
    2026-11-22T23:10:00+00:00 17 02_train exit code=0

It is read where Slurm has forgotten a job, as it does after minutes on many sites. Tasks of array 17 are 17_0, 17_1.
"""

import fcntl
import itertools
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from lmcore.errors import EXIT_INTERRUPTED, UserError
from lmcore.files import is_locked
from lmcore.text import ANSI_ESCAPE

STATES = ("submitted", "running", "stopping", "requeued", "gave-up", "cancelled", "exit")
"""stopping: SIGTERM came, as from scancel; cancelled: what it waited for failed, so that it never ran; gave-up: it was
stopped too often with nothing new saved."""

TAIL_BYTES = 1 << 18
"""So much of the end of a file is read."""

ID = re.compile(r"(local-|by-hand-)?\d+(_\d+)?")
ENDED = frozenset({
    "completed", "failed", "cancelled", "timeout", "out of memory", "node fail", "preempted", "deadline", "boot fail",
    "revoked", "stopped", "gave up", "lost", "not run", "unknown",
})  # fmt: skip
"""States of a job that is finished: Slurm's words in lower case, then those that only the log tells."""


@dataclass(frozen=True)
class Line:
    """One line of the log."""

    time_utc: str
    id: str
    name: str
    state: str
    values: dict[str, str] = field(default_factory=dict)
    """submitted: kind, after, tasks; running: host, restart; exit: code."""


@dataclass
class LoggedJob:
    """What the log says of a job, or of an array."""

    id: str
    """Slurm's id, that of the whole array for an array; local jobs have ids that begin with "local-"."""
    name: str
    kind: str = "unknown"
    """The script that it runs: workbook, notebook, writeup, sweep, sweep-table; unknown of a job by hand."""
    after: list[str] = field(default_factory=list)
    """Ids of the jobs that it waits for."""
    task_ids: list[str] = field(default_factory=list)
    """The job's id, or those of the tasks of an array; none of a job by hand."""
    lines: dict[str, list[Line]] = field(default_factory=dict)
    """What it, or each task of the array, said of itself, by its id."""

    @property
    def is_local(self) -> bool:
        """Whether Slurm has nothing to do with it."""
        return not self.id[0].isdigit()


def log_of(out: str | os.PathLike) -> Path:
    """The job log of an output folder."""
    return Path(out) / "jobs.log"


def output_file(out: str | os.PathLike, name: str, id: str) -> Path:
    """What a submitted job prints goes here."""
    return Path(out) / "jobs" / f"{name}-{id}.log"


def append(out: str | os.PathLike, id: str, name: str, state: str, **values: object) -> None:
    """Adds a line to the log, with the time before it. Raises `UserError` if it cannot be written."""
    words = [f"{key}={value}" for key, value in values.items() if value not in ("", None)]
    text = " ".join([datetime.now(UTC).isoformat(timespec="seconds"), id, name, state, *words])
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(log_of(out), "a", encoding="utf-8") as file:
            with suppress(OSError):  # not every network file system has locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{text}\n")
    except OSError as error:
        raise UserError(f"Cannot write {log_of(out)}: {error.strerror or error}.") from error


def read_log(out: str | os.PathLike) -> list[LoggedJob]:
    """The jobs of an output folder, the first submitted first. Raises `UserError` if the log cannot be read."""
    jobs: dict[str, LoggedJob] = {}
    for line in read_lines(out):
        array = line.id.partition("_")[0]
        job = jobs.setdefault(array, LoggedJob(array, line.name))
        if line.state == "submitted":
            job.kind = line.values.get("kind", job.kind)
            job.after = [id for id in line.values.get("after", "").split(",") if id]
            job.task_ids = [f"{array}_{task}" for task in numbers(line.values.get("tasks", ""))] or [array]
        else:
            job.lines.setdefault(line.id, []).append(line)
    return list(jobs.values())


def read_lines(out: str | os.PathLike) -> list[Line]:
    """The lines of the log without those that a crash has torn. Raises `UserError` if it cannot be read."""
    try:
        texts = log_of(out).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{log_of(out)} cannot be read ({error.strerror}).") from error
    return [
        Line(words[0], words[1], words[2], words[3], dict(word.split("=", 1) for word in words[4:] if "=" in word))
        for words in map(str.split, texts)
        if len(words) >= 4 and ID.fullmatch(words[1]) and words[3] in STATES
    ]


def own_state(lines: Sequence[Line]) -> str:
    """The state that a job last wrote: running, requeued, cancelled, gave up; after its end completed, stopped, failed.

    "not run" if it wrote nothing. stopped: by a signal, mostly after saving; gave up: so, and not queued again.
    """
    said = [line.state for line in lines]
    if not said:
        return "not run"
    if said[-1] == "gave-up" or said[-2:] == ["gave-up", "exit"]:
        return "gave up"
    if said[-1] == "exit":
        return {"0": "completed", str(EXIT_INTERRUPTED): "stopped"}.get(lines[-1].values.get("code", ""), "failed")
    return {"stopping": "stopped"}.get(said[-1], said[-1])


def ranges(tasks: Sequence[int]) -> str:
    """Ascending numbers in short, as --array takes them: 0-3,7."""
    groups = itertools.groupby(enumerate(tasks), lambda pair: pair[1] - pair[0])
    runs = [[task for _, task in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def numbers(ranges: str) -> list[int]:
    """The numbers that are in short in `ranges`; what is not a range is left out."""
    found = re.findall(r"(?:^|,)(\d{1,7})(?:-(\d{1,7}))?(?=,|$)", ranges)
    return [number for first, last in found for number in range(int(first), int(last or first) + 1)]


def tail_lines(path: Path) -> list[str]:
    """The lines at the end of a text file, as a terminal shows them, without empty ones; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            text = ANSI_ESCAPE.sub("", file.read(TAIL_BYTES).decode(errors="replace"))
    except OSError:
        return []
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]  # of a progress bar its last state
    return [line for line in lines[start > 0 :] if line]


def local_lock(out: Path) -> Path:
    """A file that is locked while a process runs the local jobs of this folder, one after another."""
    return out / "jobs" / ".local.lock"


def local_jobs_run(out: Path) -> bool:
    """Whether that process is there."""
    return is_locked(local_lock(out))
