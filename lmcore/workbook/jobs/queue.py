"""What Slurm says of jobs: one call of squeue for all of them, and of sacct for those that squeue has forgotten."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_TO_ANSWER = 15
FIELDS = "%i|%T|%r|%M|%S|%N|%j"


@dataclass(frozen=True)
class QueueEntry:
    """One job, or one task of an array, as Slurm sees it."""

    id: str
    """The job's id; "17_3" for a task of an array."""
    state: str
    """Slurm's word, in lower case: pending, running, completed, failed, cancelled, timeout, node fail, ..."""
    reason: str | None = None
    """Why it waits, or why it ended."""
    elapsed: str | None = None
    start: str | None = None
    """When it started or is expected to start, by Slurm's clock."""
    nodes: str | None = None
    name: str | None = None


def ask_slurm(jobs: Sequence[str]) -> tuple[dict[str, QueueEntry], str | None]:
    """What Slurm knows of these jobs, arrays task by task, and a sentence where it could not be asked."""
    if not jobs:
        return {}, None
    if shutil.which("squeue") is None:
        return {}, "Slurm is not on this machine (no squeue): the states are what the jobs themselves last wrote."
    entries, fault = squeue(jobs)
    forgotten = [job for job in jobs if not any(whole(id) == job for id in entries)]
    if forgotten and fault is None and shutil.which("sacct") is not None:
        entries |= sacct(forgotten)
    return entries, fault


def whole(job: str) -> str:
    """Id of the array that a task belongs to: 17 for 17_3; the id itself of any other job."""
    return job.partition("_")[0]


def squeue(jobs: Sequence[str]) -> tuple[dict[str, QueueEntry], str | None]:
    """The jobs that the controller remembers, and a sentence if it did not answer."""
    command = ["squeue", "--noheader", "--array", "--states=all", f"--format={FIELDS}", f"--jobs={','.join(jobs)}"]
    code, answer, said = run(command)
    if code != 0 and "Invalid job id" not in said:  # that is what it says where it knows none of them
        words = said.strip().splitlines()[-1:] or [f"squeue ended with code {code}"]
        return {}, f"Slurm does not answer ({words[0]}): the states are what the jobs themselves last wrote."
    entries = {}
    for line in answer.splitlines():
        job, state, reason, elapsed, start, nodes, name = (field.strip() for field in line.split("|", 6))
        entries[job] = QueueEntry(job, plain(state), known(reason), known(elapsed), known(start), known(nodes), name)
    return entries, None


def sacct(jobs: Sequence[str]) -> dict[str, QueueEntry]:
    """The jobs that the accounting has, none where there is no accounting."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}"]
    code, answer, _ = run([*command, "--format=JobID,State,Elapsed,NodeList,JobName"])
    if code != 0:
        return {}
    rows = [line.split("|", 4) for line in answer.splitlines() if line.count("|") >= 4]
    return {
        job: QueueEntry(job, plain(state), elapsed=known(elapsed), nodes=known(nodes), name=name)
        for job, state, elapsed, nodes, name in rows
    }


def run(command: list[str]) -> tuple[int, str, str]:
    """Exit code, output and error of one of Slurm's commands; one that does not answer in time has failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False)
    except subprocess.TimeoutExpired:
        return 1, "", f"{command[0]} gave no answer within {SECONDS_TO_ANSWER} s"
    except OSError as error:
        return 1, "", f"{command[0]} could not be started: {error.strerror}"
    return done.returncode, done.stdout, done.stderr


def plain(state: str) -> str:
    """Slurm's state in words: NODE_FAIL is node fail, "CANCELLED by 1000" is cancelled."""
    return state.split(" ")[0].rstrip("+").lower().replace("_", " ")


def known(value: str) -> str | None:
    """The value, or None for Slurm's words that there is none."""
    return None if value in ("", "None", "N/A", "(null)", "None assigned", "INVALID") else value
