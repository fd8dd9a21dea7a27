"""A job that was stopped by its time limit asks whether to be queued again: only if it got somewhere."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.workbook.jobs.log import append
from lmcore.workbook.jobs.slurm import call
from lmcore.workbook.jobs.sweep_definition import load_definition, run_names

CHECKPOINT = re.compile(r"step_(\d+)\.(?:pt|sharded)")
DONE = re.compile(
    r'\s*\{\s*("name": "[^"]*",\s*"state": "done"|"(case|cell)":.*"outcome": "(complete|out of memory)")', re.DOTALL
)
"""The record of a notebook that is done, or of a finished measurement: its outcome comes before its results."""

HEAD_BYTES = 1 << 14
"""So much of a record is read."""


def progress(out: Path) -> dict[str, int]:
    """What an output folder holds, by file: steps that a run has saved, 1 for a finished notebook or measurement."""
    found = {}
    for folder, subfolders, files in os.walk(out):
        where = Path(folder).relative_to(out).as_posix()
        if where.rpartition("/")[2] == "checkpoints":
            found[where] = max(
                (int(step[1]) for step in map(CHECKPOINT.fullmatch, [*files, *subfolders]) if step), default=0
            )
            subfolders.clear()
        elif where in ("jobs", "writeup", "figures"):
            subfolders.clear()
            continue
        for name in (name for name in files if name.endswith(".json")):
            with suppress(OSError), open(Path(folder, name), encoding="utf-8", errors="replace") as file:
                found |= {f"{where}/{name}": 1} if DONE.match(file.read(HEAD_BYTES)) else {}
    return found


def own_progress(out: Path, task: str) -> dict[str, int]:
    """The progress that is this job's: all of it, but for a task of a sweep that of its own run or measurement."""
    found = progress(out)
    with suppress(UserError):
        if task.isdecimal() and (out / "sweep.yaml").exists():
            own = dict(enumerate(run_names(load_definition(out / "sweep.yaml")))).get(int(task), "")
            return {file: count for file, count in found.items() if own in (Path(file).stem, *Path(file).parts)}
    return found


def requeue(out: str | os.PathLike, attempts: int = 3, variables: Mapping[str, str] | None = None) -> bool:
    """Decides for the job that calls this, and queues it again; `variables` are its environment.

    True: it is queued again (where there is no Slurm, the submitting process starts it again). False: it was stopped
    `attempts` times in a row without having saved anything new: more steps of a run, another notebook, another
    measurement. Raises `UserError` outside of a job, and if Slurm does not queue it again.
    """
    variables = os.environ if variables is None else variables
    require(attempts >= 1, f"--attempts must be at least 1, not {attempts}.")
    require(
        "LMCORE_JOB_ID" in variables, "This is for jobs, to queue themselves again: papermill_jobs/job.sh calls it."
    )
    out, job, name = Path(out), variables["LMCORE_JOB_ID"], variables.get("LMCORE_JOB_NAME", "job")
    file, now = out / "jobs" / f"{job}.progress.json", own_progress(out, variables.get("SLURM_ARRAY_TASK_ID", ""))
    try:
        last = read_json(file)
        got_somewhere = any(count > last["found"].get(name, 0) for name, count in now.items())
        in_vain = 0 if got_somewhere else last["in_vain"] + 1
    except (UserError, KeyError, TypeError, AttributeError):  # the first stop, or what was there at the last is unknown
        in_vain = 0 if any(now.values()) else 1
    write_json(file, {"in_vain": in_vain, "found": now})
    if in_vain >= attempts:
        append(out, job, name, "gave-up")
        return False
    append(out, job, name, "requeued")
    try:
        if variables.get("SLURM_JOB_ID"):
            call("scontrol", "requeue", job)
    except UserError:
        append(out, job, name, "gave-up")
        raise
    return True
