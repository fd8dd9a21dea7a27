"""Submitting planned jobs: scripts into OUT/jobs/, then sbatch, each after those that it waits for."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from lmcore.errors import UserError, require
from lmcore.files import atomic_write
from lmcore.workbook.jobs import scheduler
from lmcore.workbook.jobs.ledger import JobRecord, jobs_folder, natural, read_jobs, write_job
from lmcore.workbook.jobs.local import LocalJobs, new_ids
from lmcore.workbook.jobs.plan import Job
from lmcore.workbook.jobs.queue import ask_slurm
from lmcore.workbook.jobs.scripts import log_pattern, render
from lmcore.workbook.jobs.site import Site

ENDED = {
    "boot fail", "cancelled", "completed", "deadline", "failed", "node fail", "out of memory", "preempted", "revoked",
    "timeout",
}  # fmt: skip
"""Slurm's states of a job that will not run again."""

SECONDS_FOR_ANOTHER = 300
"""How long one submission for a folder waits for another one."""


def scripts_of(project: Path, jobs: Sequence[Job], site: Site, out: Path, time: str | None = None) -> dict[str, str]:
    """The rendered script of each job by its name; `time` goes before every limit of the site."""
    changes = {} if time is None else {"time": time}
    return {job.name: render(project, job, site.for_job(job.kind, job.name).replaced(changes), out) for job in jobs}


def described(jobs: Sequence[Job], scripts: Mapping[str, str], out: Path) -> str:
    """The scripts, and how they would be submitted, with names in place of ids."""
    parts = [f"# {script_file(job, out)}\n{scripts[job.name]}" for job in jobs]
    for job in jobs:
        waits = [[f"<{name}>" for name in names] for names in (job.after_ok, job.after_any)]
        parts.append(" ".join(scheduler.sbatch_command(script_file(job, out), *waits)) + f"  # <{job.name}>")
    return "\n".join(parts)


def script_file(job: Job, out: Path) -> Path:
    """Where the job's script is written."""
    return jobs_folder(out) / f"{job.name}.sbatch"


def nothing() -> None:
    """What is announced of jobs that are no notebooks."""


def submit_to_slurm(
    project: Path,
    jobs: Sequence[Job],
    scripts: Mapping[str, str],
    out: Path,
    again: bool = False,
    announce: Callable[[], None] = nothing,
    prepare: Callable[[], None] = nothing,
) -> list[JobRecord]:
    """Submits the jobs in their order and returns their records; `announce` says in the folder what is planned,
    `prepare` writes what the jobs read.

    Raises `UserError` if jobs of this folder are still queued or running (unless `again`), and if Slurm refuses one:
    those that were submitted before it are then cancelled.
    """
    for job in jobs:
        if job.tasks:
            require_array(job)
    with submitting(out):
        if not again:
            require_idle(out)
        prepare()
        records: dict[str, JobRecord] = {}
        try:
            for job in jobs:
                write_script(job, scripts, out)
                waits = [[records[name].id for name in names] for names in (job.after_ok, job.after_any)]
                submitted = scheduler.submit(script_file(job, out), project, *waits)
                records[job.name] = record_of(job, submitted, out, [*waits[0], *waits[1]], "slurm")
                write_job(out, records[job.name])
            announce()  # a job of a notebook does so too, but one that is cancelled before it starts cannot
        except BaseException as error:
            withdraw(list(records.values()), out, error)
            raise
    return list(records.values())


def require_array(job: Job) -> None:
    """Raises `UserError` if the array is larger than the cluster takes."""
    size, last = scheduler.max_array_size(), max(job.tasks or (0,))
    require(
        size is None or last < size,
        f"{job.name} has cells up to number {last}, but this cluster's arrays end at {(size or 0) - 1} (MaxArraySize): "
        "make several definitions of it, or run it with --local.",
    )


def withdraw(records: Sequence[JobRecord], out: Path, error: BaseException) -> None:
    """Cancels what was submitted of a chain that cannot be completed; raises `UserError` where there is news of it."""
    ids = [record.id for record in records]
    if not ids:
        return
    try:
        scheduler.cancel(ids)
    except UserError as failure:
        raise UserError(f"{error} The jobs {', '.join(ids)} could not be cancelled: {failure}") from error
    for record in records:
        (jobs_folder(out) / f"{record.id}.json").unlink(missing_ok=True)
    if isinstance(error, UserError):
        raise UserError(f"{error} The jobs before it are cancelled: {', '.join(ids)}.") from error


def run_locally(
    project: Path,
    jobs: Sequence[Job],
    scripts: Mapping[str, str],
    out: Path,
    again: bool = False,
    announce: Callable[[], None] = nothing,
    prepare: Callable[[], None] = nothing,
) -> int:
    """Runs the jobs here, in their order; returns the exit code of `LocalJobs.run`."""
    with submitting(out):
        if not again:
            require_idle(out)
        prepare()
        lock = hold_local(out)
        ids = dict(zip([job.name for job in jobs], new_ids(out, len(jobs)), strict=True))
        pairs = []
        for job in jobs:
            write_script(job, scripts, out)
            waits = [ids[name] for name in (*job.after_ok, *job.after_any)]
            pairs.append((job, record_of(job, ids[job.name], out, waits, "local")))
            write_job(out, pairs[-1][1])
    try:
        announce()
        return LocalJobs(project, out).run(pairs)
    finally:
        lock.release()


def write_script(job: Job, scripts: Mapping[str, str], out: Path) -> None:
    """Writes the script that is submitted."""
    with atomic_write(script_file(job, out), "w") as file:
        file.write(scripts[job.name])


def record_of(job: Job, id: str, out: Path, after: list[str], by: Literal["slurm", "local"]) -> JobRecord:
    """What the ledger keeps of a job."""
    return JobRecord(
        id=id,
        name=job.name,
        kind=job.kind,
        script=script_file(job, out).relative_to(out).as_posix(),
        log=log_pattern(job, out),
        submitted_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
        after=after,
        notebooks=list(job.notebooks),
        tasks=None if job.tasks is None else list(job.tasks),
        scheduler=by,
    )


@contextlib.contextmanager
def submitting(out: Path) -> Iterator[None]:
    """Holds the folder against other submissions. Raises `UserError` if it cannot be written to."""
    folder = jobs_folder(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".submit.lock", timeout=SECONDS_FOR_ANOTHER):
            yield
    except Timeout:
        raise UserError(f"Another process is submitting jobs for {out}; wait for it.") from None
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The folder {folder} cannot be written to ({error.strerror}).") from error


def require_idle(out: Path) -> None:
    """Raises `UserError` naming the jobs of this folder that are queued or running."""
    ids = [record.id for record in read_jobs(out) if record.scheduler == "slurm"]
    if ids and scheduler.has_slurm():
        entries, fault = ask_slurm(ids)
        require(fault is None, f"It is unknown whether jobs of {out} are still queued. {fault}")
        active = sorted((job for job, entry in entries.items() if entry.state not in ENDED), key=natural)
        require(
            not active,
            f"Jobs of {out} are still queued or running ({', '.join(active)}): wait for them, cancel them with "
            "scancel, or submit with --again.",
        )
    hold_local(out).release()


def hold_local(out: Path) -> FileLock:
    """A lock that is held while local jobs of this folder run. Raises `UserError` if others do."""
    lock = FileLock(jobs_folder(out) / ".local.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        ids = [record.id for record in read_jobs(out) if record.scheduler == "local"]
        raise UserError(
            f"Local jobs of {out} are still running (up to {ids[-1] if ids else 'the first'}): wait for them, or stop "
            "the process that submitted them."
        ) from None
    return lock
