"""Slurm's own commands: submitting a job, and asking what became of it."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require

SECONDS_TO_ANSWER = 60
"""Slurm's commands try again by themselves for some time."""

KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""The variables of Slurm that are the cluster's, not those of a job around this process."""


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
    words = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()).rstrip(".") for line in done.stderr.splitlines()]
    require(done.returncode == 0, f"{command[0]}: {'; '.join(filter(None, words)) or f'exit code {done.returncode}'}.")
    return done.stdout


def outside_of_jobs() -> dict[str, str]:
    """The environment of this process without what a job around it has set: jobs inherit what `sbatch` has."""
    own = os.environ.items()
    return {name: value for name, value in own if name in KEPT or not name.startswith(("SLURM_", "MASTER_"))}


def sbatch(arguments: Sequence[str], project: Path, environment: Mapping[str, str]) -> str:
    """Submits from the project's folder and returns the job's id. Raises `UserError` with Slurm's words."""
    try:
        answer = call("sbatch", "--parsable", *arguments, cwd=project, env=environment)
    except UserError as error:
        raise UserError(f"{error} What your cluster wants goes into papermill_jobs/site.yaml.") from None
    found = re.search(r"^(?:Submitted batch job )?(\d+)(?:;\S*)?\s*$", answer, re.MULTILINE)  # sites add lines to it
    require(found is not None, f"sbatch gave no job id, but {answer.strip()!r}.")
    return found[1]
