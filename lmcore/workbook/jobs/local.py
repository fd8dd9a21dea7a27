"""The same scripts where there is no Slurm: one after another on this machine, with the same meaning."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, UserError
from lmcore.workbook.jobs.dependencies import Job
from lmcore.workbook.jobs.log import append, output_file, own_state, read_log

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


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

    def run(self, jobs: Sequence[tuple[Job, str, Mapping[str, str]]]) -> int:
        """Jobs with their ids and variables. Returns 0 if all succeeded, 1 if one did not, 75 if a signal stopped them.

        Raises `UserError` if a log cannot be written.
        """
        before = {number: signal.signal(number, self.stop) for number in STOPPING}
        succeeded: dict[str, bool] = {}
        try:
            for job, id, variables in jobs:
                missing = [name for name in job.after_ok if not succeeded.get(name, True)]
                if missing or self.stopped:
                    append(self.out, id, job.name, "cancelled")
                    succeeded[job.name] = False
                else:
                    codes = [self.run_task(job, id, task, variables) for task in job.tasks or [None]]
                    succeeded[job.name] = set(codes) == {0}
                if missing and not self.stopped:
                    say(id, job.name, f"not run, because {', '.join(missing)} did not succeed")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopped:
            print("lmcore: stopped; the same command goes on with what is saved.", file=sys.stderr)
            return EXIT_INTERRUPTED
        return 0 if all(succeeded.values()) else EXIT_FAILURE

    def stop(self, *_: Any) -> None:
        """Tells the job that runs to save itself and end; none is started any more."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def run_task(self, job: Job, array: str, task: int | None, variables: Mapping[str, str]) -> int:
        """Runs a job, or one task of its array, until it need not be started again; returns its exit code."""
        if self.stopped:
            return EXIT_INTERRUPTED
        id = array if task is None else f"{array}_{task}"
        log = output_file(self.out, job.name, id)
        say(id, job.name, f"runs, see {log}")
        # this one's environment without what a Slurm job around it has set
        given = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | variables
        given |= {"LMCORE_JOB_ID": id, "LMCORE_JOB_NAME": job.name, "PYTHONUNBUFFERED": "1"}
        if task is not None:
            given |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": str(task)}
        restart, again = 0, True
        while again:
            code = self.run_once(
                ["bash", job.script, *job.arguments], log, given | {"SLURM_RESTART_COUNT": str(restart)}
            )
            lines = next(each for each in read_log(self.out) if each.id == array).lines.get(id, [])
            again = code == EXIT_INTERRUPTED and own_state(lines) == "requeued" and not self.stopped
            restart += 1
        said = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        say(id, job.name, "done" if code == 0 else f"ended with code {code}: {last}")
        return code

    def run_once(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
        """Runs the command to its end, with all that it prints at the end of `log`; returns its exit code."""
        try:
            with open(log, "a", encoding="utf-8") as file:
                self.process = subprocess.Popen(
                    command, cwd=self.project, env=variables, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process, which passes it on
                )  # fmt: skip
        except OSError as error:
            raise UserError(f"Cannot write the log {log}: {error.strerror or error}.") from error
        if self.stopped:  # in between
            self.stop()
        return self.process.wait()


def say(id: str, name: str, words: str) -> None:
    """One line on the terminal."""
    print(f"{id} {name}: {words}", flush=True)
