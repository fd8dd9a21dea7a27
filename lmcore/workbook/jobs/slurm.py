"""Slurm's own commands: what it says of jobs, submitting, cancelling, and queueing again."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError

SECONDS_TO_ANSWER = 60
"""Slurm's commands try again by themselves for some time."""

SITE_WORDS = re.compile(r"partition|account|qos|gres|node configuration|node count|time limit|memory", re.IGNORECASE)
WHERE_TO_CHANGE = (
    "What your cluster wants stands in papermill_jobs/site.yaml, or in the file after --site; sinfo -s lists "
    "partitions."
)
OF_A_JOB = ("SLURM_ARRAY_", "SLURM_STEP", "SLURM_RESTART_COUNT", "LMCORE_JOB_", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a job that are not for the jobs it submits: sbatch hands its environment on, a task's number, too."""


@dataclass(frozen=True)
class QueueEntry:
    """One job, or one task of an array, as Slurm sees it."""

    state: str
    """Slurm's word, in lower case: pending, running, completed, failed, cancelled, timeout, node fail, ..."""
    reason: str | None = None
    """Why it waits, or why it ended."""
    start: str | None = None
    """When it started or is expected to start, by Slurm's clock."""
    name: str | None = None


def has_slurm() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


def ask_slurm(jobs: Sequence[str]) -> tuple[dict[str, QueueEntry], str | None]:
    """What Slurm knows of these jobs, arrays task by task, and a sentence where it could not be asked.

    One call of squeue for all, and one of sacct, where there is accounting, for those that squeue has forgotten.
    """
    if not jobs:
        return {}, None
    if shutil.which("squeue") is None:
        return {}, "Slurm is not on this machine (no squeue): the states are what the jobs themselves last wrote."
    options = ["--noheader", "--array", "--states=all", "--format=%i|%T|%r|%S|%j"]
    code, answer, said = ask(["squeue", *options, f"--jobs={','.join(jobs)}"])
    if code != 0 and "Invalid job id" not in said:  # that is what it says where it knows none of them
        words = said.strip().splitlines()[-1:] or [f"squeue ended with code {code}"]
        return {}, f"Slurm does not answer ({words[0]}): the states are what the jobs themselves last wrote."
    entries = {}
    for line in filter(None, answer.splitlines()):
        job, state, reason, start, name = (field.strip() for field in line.split("|", 4))
        entries[job] = QueueEntry(in_words(state), known(reason), known(start), name)
    forgotten = set(jobs) - {job.partition("_")[0] for job in entries}
    if forgotten and shutil.which("sacct") is not None:
        options = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State,JobName"]
        _, answer, _ = ask(["sacct", *options, f"--jobs={','.join(sorted(forgotten))}"])
        rows = [line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2]
        entries |= {job: QueueEntry(in_words(state), name=name) for job, state, name in rows}
    return entries, None


def in_words(state: str) -> str:
    """Slurm's state in words: NODE_FAIL is node fail, "CANCELLED by 1000" is cancelled."""
    return state.split(" ")[0].rstrip("+").lower().replace("_", " ")


def known(value: str) -> str | None:
    """The value, or None for Slurm's words that there is none."""
    return None if value in ("", "None", "N/A", "(null)", "INVALID") else value


def sbatch(arguments: Sequence[str], project: Path, variables: Mapping[str, str]) -> str:
    """Submits from the project's folder, with these variables, and returns the job's id.

    Raises `UserError` with Slurm's sentence.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)}
    try:
        answer = demand(["sbatch", "--parsable", *arguments], cwd=project, env={**environment, **variables})
    except UserError as error:
        raise UserError(f"{error} {WHERE_TO_CHANGE}" if SITE_WORDS.search(str(error)) else str(error)) from None
    job = answer.strip().rpartition("\n")[2].partition(";")[0]  # id, or id;cluster
    if not job.isdecimal():
        raise UserError(f"sbatch gave no job id, but {answer.strip()!r}.")
    return job


def max_array_size() -> int | None:
    """Numbers of an array's tasks are below this; None where Slurm does not tell."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask(["scontrol", "show", "config"])[1], re.MULTILINE)
    return int(found[1]) if found else None


def demand(command: Sequence[str], **options: Any) -> str:
    """What one of Slurm's commands prints. Raises `UserError` with the words that it ends with."""
    code, answer, error = ask(command, **options)
    if code == 0:
        return answer
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in error.splitlines()]
    words = "; ".join(line.rstrip(".") for line in lines if line) or f"it ended with code {code}"
    raise UserError(f"{command[0]}: {words}.")


def ask(command: Sequence[str], **options: Any) -> tuple[int, str, str]:
    """Exit code, output and error of one of Slurm's commands; one that does not answer in time has failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False, **options
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {SECONDS_TO_ANSWER} s"
    except OSError as error:
        return 1, "", f"it could not be started: {error.strerror}"
    return done.returncode, done.stdout, done.stderr
