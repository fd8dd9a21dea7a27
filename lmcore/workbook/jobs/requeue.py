"""A job that was stopped by its time limit asks whether to be queued again: only if it got somewhere."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.workbook.jobs.log import append
from lmcore.workbook.jobs.slurm import demand
from lmcore.workbook.jobs.sweep_definition import cell_names, load_definition

CHECKPOINT = re.compile(r"step_(\d+)\.pt")
MEASURED = re.compile(r'\s*\{\s*"cell":.*"outcome": "(complete|out of memory)"', re.DOTALL)
"""The record of a finished measurement, see lmcore.profiling.runner: its outcome comes before its results."""

HEAD_BYTES = 1 << 14
"""So much of a record is read."""


def progress(out: Path) -> dict[str, int]:
    """What an output folder holds, by file: steps that a run has saved, 1 for a finished notebook or measurement."""
    found = {}
    for folder, subfolders, files in os.walk(out):
        here = Path(folder)
        where = here.relative_to(out).as_posix()
        if here.name == "checkpoints":
            found[where] = max((int(step[1]) for step in map(CHECKPOINT.fullmatch, files) if step), default=0)
            subfolders.clear()
        elif here.parent == out and here.name in ("jobs", "writeup", "figures"):
            subfolders.clear()
        else:
            found |= {f"{where}/{name}": 1 for name in files if name.endswith(".json") and is_done(here / name)}
    return found


def is_done(file: Path) -> bool:
    """Whether a JSON file is the record of a notebook that is done or of a measurement that is finished."""
    with suppress(OSError, UserError):  # another process writes it, or has moved it, at this moment
        with open(file, encoding="utf-8", errors="replace") as opened:
            if MEASURED.match(opened.read(HEAD_BYTES)):
                return True
        if file.parent.name == "notebooks":
            record = read_json(file)
            return isinstance(record, dict) and record.get("state") == "done"
    return False


def own_progress(out: Path, task: str) -> dict[str, int]:
    """The progress that is this job's: all of it, but for a task of a sweep that of its own run or measurement."""
    found = progress(out)
    with suppress(UserError):
        if task.isdecimal() and (out / "sweep.yaml").exists():
            own = dict(enumerate(cell_names(load_definition(out / "sweep.yaml")))).get(int(task), "")
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
    out, job, name = Path(out), variables.get("LMCORE_JOB_ID"), variables.get("LMCORE_JOB_NAME", "job")
    if job is None:
        raise UserError("This is for jobs, to queue themselves again: papermill_jobs/job.sh calls it.")
    file = out / "jobs" / f"{job}.progress.json"
    before, now = last_stop(file), own_progress(out, variables.get("SLURM_ARRAY_TASK_ID", ""))
    got_somewhere = any(count > before["found"].get(name, 0) for name, count in now.items())
    in_vain = 0 if got_somewhere else before["in_vain"] + 1
    write_json(file, {"in_vain": in_vain, "found": now})
    if in_vain >= attempts:
        append(out, job, name, "gave-up")
        return False
    append(out, job, name, "requeued")
    try:
        if variables.get("SLURM_JOB_ID"):
            demand(["scontrol", "requeue", job])
    except UserError:
        append(out, job, name, "gave-up")
        raise
    return True


def last_stop(file: Path) -> dict[str, Any]:
    """What was there when the job was stopped before; nothing if that is unknown."""
    with suppress(UserError):
        values = read_json(file)
        if isinstance(values, dict) and isinstance(values.get("in_vain"), int):
            found = values.get("found")
            if isinstance(found, dict) and all(isinstance(count, int) for count in found.values()):
                return values
    return {"in_vain": 0, "found": {}}
