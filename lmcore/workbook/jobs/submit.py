"""`lmcore submit`: a chain of jobs to Slurm or, where there is none, run here; what was submitted is in the job log."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from lmcore.errors import UserError, require
from lmcore.workbook.jobs import slurm
from lmcore.workbook.jobs.dependencies import Chain, Job
from lmcore.workbook.jobs.local import LocalJobs
from lmcore.workbook.jobs.log import ENDED, append, hold_local, ranges, read_log
from lmcore.workbook.parameters import find_notebooks
from lmcore.workbook.record import update_plan

SECONDS_FOR_ANOTHER = 300
"""How long one submission for a folder waits for another one."""


def submit(chain: Chain, again: bool = False) -> dict[str, str]:
    """Submits the jobs in their order and returns their ids by name.

    Raises `UserError` if jobs of this folder are still queued or running (unless `again`), and if Slurm refuses one:
    those that were submitted before it are then cancelled.
    """
    last = max(number for job in chain.jobs for number in (0, *job.tasks))
    size = slurm.max_array_size() if last else None
    require(
        size is None or last < size,
        f"{chain.jobs[0].name} has tasks up to number {last}, but this cluster's arrays end at {(size or 0) - 1} "
        "(MaxArraySize): make several definitions of it, or run it with --local.",
    )
    ids: dict[str, str] = {}
    with submitting(chain, again):
        try:
            for job in chain.jobs:
                options = ["--export=ALL", *chain.site_of(job).options(), *chain.options(job)]
                words = [*chain.dependency(job, ids), *options, job.script, *job.arguments]
                ids[job.name] = slurm.sbatch(words, chain.project, environment(chain, job))
                log_submitted(chain, job, ids)
            announce(chain)  # a job of a notebook does so too, but one that is cancelled before it starts cannot
        except BaseException as error:
            withdraw(chain, ids, error)
            raise
    return ids


def environment(chain: Chain, job: Job) -> dict[str, str]:
    """The variables of a job, with the `lmcore` that submits it first on the PATH."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}", **chain.variables(job)}


def log_submitted(chain: Chain, job: Job, ids: Mapping[str, str]) -> None:
    """Writes into the job log what a job was submitted as."""
    after = ",".join(ids[name] for name in (*job.after_ok, *job.after_any))
    append(chain.out, ids[job.name], job.name, "submitted", kind=job.kind, after=after, tasks=ranges(job.tasks))


def announce(chain: Chain) -> None:
    """Adds the notebooks of the jobs to the plan of the folder, so that a writeup names those that never ran, too."""
    variables = chain.jobs[0].variables
    if "SCALE" in variables:
        known = [path.stem for path in find_notebooks(chain.project)]
        names = " ".join(job.variables.get("NOTEBOOKS", "") for job in chain.jobs).split()
        update_plan(chain.out, variables["SCALE"], variables["DATA"], names or known, known)


def withdraw(chain: Chain, ids: Mapping[str, str], error: BaseException) -> None:
    """Cancels what was submitted of a chain that cannot be completed; raises `UserError` where there is news of it."""
    listed = ", ".join(ids.values())
    if not ids:
        return
    try:
        slurm.demand(["scancel", *ids.values()])
    except UserError as failure:
        raise UserError(f"{error} The jobs {listed} could not be cancelled: {failure}") from error
    for name, id in ids.items():
        append(chain.out, id, name, "cancelled")
    if isinstance(error, UserError):
        raise UserError(f"{error} The jobs before it are cancelled: {listed}.") from error


def run_here(chain: Chain, again: bool = False) -> int:
    """Runs the jobs on this machine, in their order; returns the exit code of `LocalJobs.run`."""
    with submitting(chain, again):
        lock = hold_local(chain.out)
        used = [int(job.id.removeprefix("local-")) for job in read_log(chain.out) if job.id.startswith("local-")]
        ids = {job.name: f"local-{max(used, default=0) + number}" for number, job in enumerate(chain.jobs, 1)}
        for job in chain.jobs:
            log_submitted(chain, job, ids)
    try:
        announce(chain)
        return LocalJobs(chain.project, chain.out).run(
            [(job, ids[job.name], environment(chain, job)) for job in chain.jobs]
        )
    finally:
        lock.release()


@contextlib.contextmanager
def submitting(chain: Chain, again: bool) -> Iterator[None]:
    """Holds the folder against other submissions, and writes what a sweep's tasks follow.

    Raises `UserError` if the folder cannot be written to, and, unless `again`, if its jobs are not finished.
    """
    folder = chain.out / "jobs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".submit.lock", timeout=SECONDS_FOR_ANOTHER):
            if not again:
                require_idle(chain.out)
            if chain.definition is not None:
                from lmcore.workbook.jobs.sweeps import freeze

                freeze(chain.definition, chain.out)
            yield
    except Timeout:
        raise UserError(f"Another process is submitting jobs for {chain.out}; wait for it.") from None
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be written to ({error.strerror or error}).") from error


def require_idle(out: Path) -> None:
    """Raises `UserError` naming the jobs of this folder that are queued or running."""
    ids = [job.id for job in read_log(out) if not job.is_local]
    if ids and slurm.has_slurm():
        entries, fault = slurm.ask_slurm(ids)
        require(fault is None, f"It is unknown whether jobs of {out} are still queued. {fault}")
        active = [id for id, entry in entries.items() if entry.state not in ENDED]
        active.sort(key=lambda id: [int(number) for number in re.findall(r"\d+", id)])
        require(
            not active,
            f"Jobs of {out} are still queued or running ({', '.join(active)}): wait for them, cancel them with "
            "scancel, or submit with --again.",
        )
    hold_local(out).release()
