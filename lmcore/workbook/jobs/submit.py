"""`lmcore submit`: a chain of jobs to Slurm or, where there is none, run here; what was submitted is in the job log."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, UserError, require
from lmcore.files import write_json
from lmcore.stopping import StopEvent, stop_signals
from lmcore.workbook.jobs import slurm
from lmcore.workbook.jobs.dependencies import Chain, Job
from lmcore.workbook.jobs.log import ENDED, append, local_lock, output_file, ranges, read_lines, read_log, tail_lines
from lmcore.workbook.parameters import find_notebooks
from lmcore.workbook.record import exclusive, update_plan

SECONDS_FOR_ANOTHER = 300
"""How long one submission for a folder waits for another one."""

SECONDS_BETWEEN_LOOKS = 0.1


def submit(chain: Chain, again: bool = False) -> dict[str, str]:
    """Submits the jobs in their order and returns their ids by name.

    Raises `UserError` if jobs of this folder are still queued or running (unless `again`), and if Slurm refuses one:
    those that were submitted before it are then cancelled.
    """
    last = max(number for job in chain.jobs for number in (0, *job.tasks))
    size = slurm.max_array_size() if last else 1
    require(
        last < size,
        f"{chain.jobs[0].name} has tasks up to number {last}, but this cluster's arrays end at {size - 1} "
        "(MaxArraySize): make several definitions of it, or run it with --local.",
    )
    ids: dict[str, str] = {}
    with submitting(chain, again):
        try:
            for job in chain.jobs:
                words = [*job.options, *job.dependency(ids), job.script, *job.arguments]
                ids[job.name] = slurm.sbatch(words, chain.project, environment(job))
                log_submitted(chain, job, ids)
            announce(chain)  # a job of a notebook does so too, but one that is cancelled before it starts cannot
        except BaseException as error:
            if ids:
                withdraw(chain, ids, error)
            raise
    return ids


def environment(job: Job) -> dict[str, str]:
    """The variables of a job, with the `lmcore` that submits it first on the PATH."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}", **job.variables}


def log_submitted(chain: Chain, job: Job, ids: Mapping[str, str]) -> None:
    """Writes into the job log what a job was submitted as."""
    after = ",".join(ids[name] for name in job.after)
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
    try:
        slurm.call("scancel", *ids.values())
    except UserError as failure:
        raise UserError(f"{error} The jobs {listed} could not be cancelled: {failure}") from error
    for name, id in ids.items():
        append(chain.out, id, name, "cancelled")
    if isinstance(error, UserError):
        raise UserError(f"{error} The jobs before it are cancelled: {listed}.") from error


@contextlib.contextmanager
def submitting(chain: Chain, again: bool) -> Iterator[None]:
    """Holds the folder against other submissions, and writes what a sweep's tasks follow.

    Raises `UserError` if the folder cannot be written to, and, unless `again`, if its jobs are not finished.
    """
    refusal = f"Another process is submitting jobs for {chain.out}; wait for it."
    with exclusive({chain.out / "jobs" / ".submit.lock": refusal}, SECONDS_FOR_ANOTHER):
        if not again:
            require_idle(chain.out)
        if chain.definition is not None:
            from lmcore.workbook.jobs.sweeps import freeze

            freeze(chain.definition, chain.out)
        for job in chain.jobs:
            if job.settings is not None:
                write_json(job.variables["CONFIG"], job.settings)
        yield


def require_idle(out: Path) -> None:
    """Raises `UserError` naming the jobs of this folder that are queued or running."""
    ids = [job.id for job in read_log(out) if not job.is_local]
    if ids and shutil.which("sbatch"):
        entries, fault = slurm.ask_slurm(ids)
        require(fault is None, f"It is unknown whether jobs of {out} are still queued. {fault}")
        queued = [id for id, entry in entries.items() if entry.state not in ENDED]
        active = [id for job in ids for id in queued if id.partition("_")[0] == job]  # in the order of submission
        require(
            not active,
            f"Jobs of {out} are still queued or running ({', '.join(active)}): wait for them, cancel them with "
            "scancel, or submit with --again.",
        )
    with holding_local(out):
        pass


def holding_local(out: Path) -> contextlib.AbstractContextManager[None]:
    """A lock that is held while local jobs of this folder run. Raises `UserError` if others do."""
    ids = [job.id for job in read_log(out) if job.is_local]
    up_to = f"up to {ids[-1] if ids else 'the first'}"
    refusal = (
        f"Local jobs of {out} are still running ({up_to}): wait for them, or stop the process that submitted them."
    )
    return exclusive({local_lock(out): refusal}, 0)


# ---- the same scripts where there is no Slurm


def run_here(chain: Chain, again: bool = False) -> int:
    """Runs the jobs on this machine, in their order; returns 0 if all succeeded, 1 if one did not, 75 if stopped.

    Raises `UserError` if jobs of this folder are still queued or running (unless `again`), or a log cannot be written.
    """
    with contextlib.ExitStack() as held:
        with submitting(chain, again):
            held.enter_context(holding_local(chain.out))
            used = [int(job.id.removeprefix("local-")) for job in read_log(chain.out) if job.id.startswith("local-")]
            ids = {job.name: f"local-{max(used, default=0) + number}" for number, job in enumerate(chain.jobs, 1)}
            for job in chain.jobs:
                log_submitted(chain, job, ids)
        announce(chain)
        return LocalJobs(chain, ids).run()


class LocalJobs:
    """Runs submitted jobs one after another, within this process's lifetime.

    A job is left out if one that must succeed before it did not. A job that saved itself at a signal of its own, and
    got somewhere, is started again, as Slurm queues it again. Ctrl-C and stop signals stop the job that runs in an
    orderly way, a second one at once, and the rest stays undone.
    """

    def __init__(self, chain: Chain, ids: Mapping[str, str]):
        self.chain, self.ids = chain, ids
        self.stop = StopEvent()
        self.process: subprocess.Popen | None = None

    def run(self) -> int:
        """Runs all; returns the exit code of `run_here`."""
        failed: set[str] = set()
        with stop_signals(signal.SIGINT, exits=True) as self.stop:
            self.stop.before_exit = self.tell
            for job in self.chain.jobs:
                missing = [] if job.whatever_happens else [name for name in job.after if name in failed]
                if not missing and not self.stop.is_set():
                    codes = [self.run_task(job, task) for task in job.tasks or [None]]
                    failed |= {job.name} if any(codes) else set()
                    continue
                failed.add(job.name)
                append(self.chain.out, self.ids[job.name], job.name, "cancelled")
                if not self.stop.is_set():
                    say(self.ids[job.name], job, f"not run, because {', '.join(missing)} did not succeed")
        if self.stop.is_set():
            print("lmcore: stopped; the same command resumes with what is saved.", file=sys.stderr)
            return EXIT_INTERRUPTED
        return EXIT_FAILURE if failed else 0

    def tell(self) -> None:
        """Tells the job that runs to save itself and end, the second time to end at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit code of the job that runs, which is told of a stop signal."""
        while (code := self.process.poll()) is None and not self.stop.is_set():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if code is None:
            self.tell()
        return self.process.wait()

    def run_task(self, job: Job, task: int | None) -> int:
        """Runs a job, or one task of its array, until it need not be started again; returns its exit code."""
        if self.stop.is_set():
            return EXIT_INTERRUPTED
        out, array = self.chain.out, self.ids[job.name]
        id = array if task is None else f"{array}_{task}"
        log = output_file(out, job.name, id)
        # this one's environment without what a Slurm job around it has set
        variables = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        variables |= environment(job)
        variables |= {"LMCORE_JOB_ID": id, "LMCORE_JOB_NAME": job.name, "PYTHONUNBUFFERED": "1"}
        if task is not None:
            variables |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": str(task)}
        say(id, job, f"runs, see {log}")
        for restart in itertools.count():
            try:
                with open(log, "a", encoding="utf-8") as file:
                    self.process = subprocess.Popen(
                        ["bash", job.script, *job.arguments],
                        cwd=self.chain.project, env=variables | {"SLURM_RESTART_COUNT": str(restart)},
                        stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C is for this process, which passes it on
                    )  # fmt: skip
            except OSError as error:
                raise UserError(f"Cannot write the log {log}: {error.strerror or error}.") from error
            code = self.wait()
            if self.stop.is_set() or [line.state for line in read_lines(out) if line.id == id][-1:] != ["requeued"]:
                break
        said = tail_lines(log) or ["it said nothing"]
        say(id, job, "done" if code == 0 else f"ended with code {code}: {said[-1].strip()}")
        return code


def say(id: str, job: Job, words: str) -> None:
    """One line on the terminal."""
    print(f"{id} {job.name}: {words}", flush=True)
