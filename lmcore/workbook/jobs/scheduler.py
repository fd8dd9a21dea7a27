"""Submitting and cancelling by Slurm's own commands."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmcore.errors import UserError, require

SECONDS_TO_ANSWER = 60
"""Slurm's commands try again by themselves for some time."""

SITE_WORDS = re.compile(r"partition|account|qos|gres|node configuration|node count|time limit|memory", re.IGNORECASE)
WHERE_TO_CHANGE = (
    "What your cluster wants stands in papermill_jobs/site.yaml, or in the file after --site; sinfo -s lists "
    "partitions."
)


class Refused(UserError):
    """Slurm did not take a job, or did not answer."""


def has_slurm() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


def sbatch_command(script: Path | str, after_ok: Sequence[str], after_any: Sequence[str]) -> list[str]:
    """The command that submits a script which waits for the jobs with these ids."""
    waits = [f"after{how}:{':'.join(ids)}" for how, ids in (("ok", after_ok), ("any", after_any)) if ids]
    return ["sbatch", "--parsable", *([f"--dependency={','.join(waits)}"] if waits else []), str(script)]


def submit(script: Path, project: Path, after_ok: Sequence[str] = (), after_any: Sequence[str] = ()) -> str:
    """Submits a script from the project's folder and returns the job's id. Raises `Refused` with Slurm's sentence."""
    try:
        answer = run(sbatch_command(script, after_ok, after_any), project, outside_of_jobs(os.environ))
    except Refused as error:
        if SITE_WORDS.search(str(error)):
            raise Refused(f"{error} {WHERE_TO_CHANGE}") from None
        raise
    job = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""  # id, or id;cluster
    if not job.isdecimal():
        raise Refused(f"sbatch gave no job id for {script}, but {answer.strip()!r}.")
    return job


def outside_of_jobs(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a job around it has set: sbatch hands that on, a task's number, too."""
    own = ("SLURM_ARRAY_", "SLURM_STEP", "SLURM_RESTART_COUNT", "LMCORE_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in variables.items() if not name.startswith(own)}


def max_array_size() -> int | None:
    """Numbers of an array's tasks are below this; None where Slurm does not tell."""
    try:
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", run(["scontrol", "show", "config"]), re.MULTILINE)
    except UserError:
        return None
    return int(found[1]) if found else None


def cancel(jobs: Sequence[str]) -> None:
    """Cancels jobs; those that have ended already stay as they are. Raises `Refused` if Slurm does not answer."""
    if jobs:
        run(["scancel", *jobs])


def requeue(job: str) -> None:
    """Queues this running job again, with the same id. Raises `Refused` if Slurm does not want to."""
    run(["scontrol", "requeue", job])


def run(command: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What one of Slurm's commands prints. Raises `Refused` with the words that it ends with."""
    require(shutil.which(command[0]) is not None, f"There is no {command[0]} on this machine; submit with --local.")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{command[0]} gave no answer within {SECONDS_TO_ANSWER} s; see whether sinfo does.") from None
    if done.returncode != 0:
        raise Refused(f"{command[0]}: {said(done.stderr) or f'it ended with code {done.returncode}'}.")
    return done.stdout


def said(error: str) -> str:
    """The errors that one of Slurm's commands printed, as one sentence without a full stop."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in error.splitlines()]
    return "; ".join(line.rstrip(".") for line in lines if line)
