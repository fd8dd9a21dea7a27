"""The same scripts where there is no Slurm: one after another on this machine, with the same meaning."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, UserError
from lmcore.workbook.jobs.ledger import JobRecord, append_state, read_jobs, states
from lmcore.workbook.jobs.plan import Job

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def new_ids(out: Path, count: int) -> list[str]:
    """Ids that no local job of this output folder has had."""
    had = [int(record.id.removeprefix("local-")) for record in read_jobs(out) if record.scheduler == "local"]
    return [f"local-{max(had, default=0) + number}" for number in range(1, count + 1)]


class LocalJobs:
    """Runs submitted jobs in this process's lifetime, in their order, which is one of dependencies.

    A job is left out if one that must succeed before it did not. A job that saved itself at a signal of its own, and
    got somewhere, is started again, as Slurm queues it again. Ctrl-C, SIGTERM and SIGUSR1 stop the job that runs in an
    orderly way, and the rest stays undone.
    """

    def __init__(self, project: Path, out: Path):
        self.project, self.out = project, out
        self.stopped = False
        self.process: subprocess.Popen | None = None

    def run(self, jobs: Sequence[tuple[Job, JobRecord]]) -> int:
        """Exit code: 0 if all succeeded, 1 if one did not, 75 if a signal stopped them."""
        before = {number: signal.signal(number, self.stop) for number in STOPPING}
        ended: dict[str, bool] = {}
        try:
            for job, record in jobs:
                if self.stopped:
                    append_state(self.out, record.id, "cancelled")
                    continue
                missing = [name for name in job.after_ok if not ended.get(name, True)]
                if missing:
                    append_state(self.out, record.id, "cancelled")
                    say(record.id, job.name, f"not run, because {', '.join(missing)} did not succeed")
                    ended[job.name] = False
                else:
                    ended[job.name] = self.run_job(job, record)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopped:
            print("lmcore: stopped; the same command goes on with what is saved.", file=sys.stderr)
            return EXIT_INTERRUPTED
        return 0 if all(ended.values()) else EXIT_FAILURE

    def stop(self, *_: Any) -> None:
        """Tells the job that runs to save itself and end; none is started any more."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def run_job(self, job: Job, record: JobRecord) -> bool:
        """Runs a job, or each task of its array; whether all succeeded."""
        succeeded = True
        for task, name in zip(record.tasks or [None], record.task_ids, strict=True):
            if self.stopped:
                return False
            log = record.log_file(task)
            say(name, job.name, f"runs, see {log}")
            code = self.run_task(self.out / record.script, log, name, variables(record.id, name, task))
            succeeded &= code == 0
            say(name, job.name, "done" if code == 0 else f"ended with code {code}: {last_line(log)}")
        return succeeded

    def run_task(self, script: Path, log: Path, name: str, environment: Mapping[str, str]) -> int:
        """Runs one script until it is done or need not be started again; returns its exit code."""
        restart = 0
        while True:
            with appending(log) as file:
                self.process = subprocess.Popen(
                    ["bash", str(script)],
                    cwd=self.project,
                    env={**environment, "SLURM_RESTART_COUNT": str(restart)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process, which passes it on
                )
            if self.stopped:  # in between
                self.stop()
            code = self.process.wait()
            said = states(self.out, name)
            again = code == EXIT_INTERRUPTED and bool(said) and said[-1].state == "requeued"
            if self.stopped or not again:
                return code
            restart += 1


@contextmanager
def appending(log: Path) -> Iterator[IO]:
    """The log, to write at its end. Raises `UserError` if it cannot be written."""
    try:
        file = open(log, "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"Cannot write the log {log}: {error.strerror or error}.") from error
    with file:
        yield file


def variables(array: str, name: str, task: int | None) -> dict[str, str]:
    """The environment of a local job: this one's, without what a Slurm job around it has set."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    if task is not None:
        environment |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": str(task)}
    return environment | {"LMCORE_JOB_ID": name, "PYTHONUNBUFFERED": "1"}


def say(job: str, name: str, words: str) -> None:
    """One line on the terminal."""
    print(f"{job} {name}: {words}", flush=True)


def last_line(log: Path) -> str:
    """The last words of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
