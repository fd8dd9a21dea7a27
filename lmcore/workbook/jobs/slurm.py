"""Slurm's own commands: what it says of jobs, submitting, and an array's size."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lmcore.errors import UserError

SECONDS_TO_ANSWER = 60
"""Slurm's commands try again by themselves for some time."""

SITE_WORDS = re.compile(r"partition|account|qos|gres|node configuration|node count|time limit|memory", re.IGNORECASE)
WHERE_TO_CHANGE = (
    " What your cluster wants stands in papermill_jobs/site.yaml, or in the file after --site; sinfo -s lists "
    "partitions."
)
OF_A_JOB = ("SLURM_ARRAY_", "SLURM_STEP", "SLURM_RESTART_COUNT", "LMCORE_JOB_", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a job that are not for the jobs it submits: sbatch hands its environment on, a task's number, too."""


class QueueEntry(NamedTuple):
    """A job, or a task of an array, as Slurm sees it."""

    state: str
    """Slurm's word, in lower case: pending, running, completed, failed, cancelled, timeout, node fail, ..."""
    reason: str | None = None
    """Why it waits, or why it ended."""
    start: str | None = None
    """When it started or is expected to start, by Slurm's clock."""


def call(*command: str, **options: Any) -> str:
    """What one of Slurm's commands prints. Raises `UserError` with the words of one that fails or does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer within {SECONDS_TO_ANSWER} s.") from None
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started here: {error.strerror}.") from None
    if done.returncode == 0:
        return done.stdout
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()).rstrip(".") for line in done.stderr.splitlines()]
    raise UserError(f"{command[0]}: {'; '.join(filter(None, lines)) or f'it ended with code {done.returncode}'}.")


def ask_slurm(jobs: Sequence[str]) -> tuple[dict[str, QueueEntry], str | None]:
    """What Slurm knows of these jobs, arrays task by task, and a sentence where it could not be asked.

    One call of squeue for all, and one of sacct, where there is accounting, for those that squeue has forgotten.
    """
    answers = ""
    try:
        if jobs:
            answers = call(
                "squeue", "-h", "--array", "--states=all", "--format=%i|%T|%r|%S", f"--jobs={','.join(jobs)}"
            )
    except UserError as error:
        if "Invalid job id" not in str(error):  # that is what it says where it knows none of them
            fault = str(error).rstrip(".")
            return {}, f"Slurm does not answer ({fault}): the states are what the jobs themselves last wrote."
    forgotten = set(jobs) - {line.partition("|")[0].partition("_")[0] for line in answers.splitlines()}
    with suppress(UserError):  # many sites have no accounting
        if forgotten:
            options = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
            answers += call("sacct", *options, f"--jobs={','.join(sorted(forgotten))}")
    entries = {}
    for line in filter(None, answers.splitlines()):
        job, state, *rest = line.split("|")[:4]
        word = state.split(" ")[0].rstrip("+").lower().replace("_", " ")  # NODE_FAIL, CANCELLED+, CANCELLED by 1000
        known = [None if text in ("", "None", "N/A", "(null)", "INVALID") else text for text in rest]
        entries[job] = QueueEntry(word, *known)
    return entries, None


def sbatch(arguments: Sequence[str], project: Path, variables: Mapping[str, str]) -> str:
    """Submits from the project's folder, with these variables, and returns the job's id.

    Raises `UserError` with Slurm's sentence.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)}
    try:
        answer = call("sbatch", "--parsable", *arguments, cwd=project, env={**environment, **variables})
    except UserError as error:
        raise UserError(f"{error}{WHERE_TO_CHANGE if SITE_WORDS.search(str(error)) else ''}") from None
    job = answer.strip().rpartition("\n")[2].partition(";")[0]  # id, or id;cluster
    if not job.isdecimal():
        raise UserError(f"sbatch gave no job id, but {answer.strip()!r}.")
    return job


def max_array_size() -> float:
    """Numbers of an array's tasks are below this; infinite where Slurm does not tell."""
    with suppress(UserError):
        if found := re.search(r"^MaxArraySize\s*=\s*(\d+)", call("scontrol", "show", "config"), re.MULTILINE):
            return int(found[1])
    return float("inf")
