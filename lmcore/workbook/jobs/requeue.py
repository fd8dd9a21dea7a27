"""A job that was stopped by its time limit asks whether to be queued again: only if it got somewhere."""

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.workbook.jobs.ledger import append_state, jobs_folder
from lmcore.workbook.jobs.scheduler import Refused
from lmcore.workbook.jobs.scheduler import requeue as slurm_requeue
from lmcore.workbook.jobs.sweep_definition import cell_names, load_definition

CHECKPOINT = re.compile(r"step_(\d+)\.pt")
CELL = re.compile(r'\s*\{\s*"cell":')
"""How the record of a measured cell begins, see lmcore.profiling.runner."""

FINISHED = re.compile(r'"outcome": "(complete|out of memory)"')
HEAD_BYTES = 1 << 14
"""So much of a record is read: its outcome comes before its results."""


def progress(out: Path) -> dict[str, int]:
    """What an output folder holds, by file: steps that a run has saved, and 1 for each finished notebook and cell."""
    found = {}
    for folder, subfolders, files in os.walk(out):
        here = Path(folder)
        where = here.relative_to(out).as_posix()
        if here.name == "checkpoints":
            steps = [int(match[1]) for name in files if (match := CHECKPOINT.fullmatch(name))]
            found[where] = max(steps, default=0)
            subfolders.clear()
        elif here.parent == out and here.name in ("jobs", "writeup", "figures"):
            subfolders.clear()
        else:
            found |= {f"{where}/{name}": 1 for name in files if name.endswith(".json") and is_done(here / name)}
    return found


def own_progress(out: Path, variables: Mapping[str, str]) -> dict[str, int]:
    """The progress that is this job's: all of it, but for a task of a sweep that of its own cell."""
    found = progress(out)
    task = variables.get("SLURM_ARRAY_TASK_ID", "")
    if not (task.isdecimal() and (out / "sweep.yaml").exists()):
        return found
    try:
        names = cell_names(load_definition(out / "sweep.yaml"))
    except UserError:
        return found
    own = names[int(task)] if int(task) < len(names) else ""
    return {file: count for file, count in found.items() if own in (Path(file).stem, *Path(file).parts)}


def is_done(file: Path) -> bool:
    """Whether a JSON file is the record of a notebook that is done or of a cell that is finished."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            head = opened.read(HEAD_BYTES)
        if CELL.match(head):
            return FINISHED.search(head) is not None
        if file.parent.name == "notebooks":
            record = read_json(file)
            return isinstance(record, dict) and record.get("state") == "done"
    except (OSError, UserError):  # another process writes it, or has moved it, at this moment
        return False
    return False


def got_somewhere(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether anything was saved since: more steps of a run, another notebook, another cell."""
    return any(count > before.get(name, 0) for name, count in now.items())


def requeue(out: str | os.PathLike, attempts: int = 3, variables: Mapping[str, str] | None = None) -> bool:
    """Decides for the job that calls this, and queues it again; `variables` are its environment.

    True: it is queued again (where there is no Slurm, the submitting process starts it again). False: it was stopped
    `attempts` times in a row without having saved anything new. Raises `UserError` outside of a job, and if Slurm
    does not queue it again.
    """
    variables = os.environ if variables is None else variables
    require(attempts >= 1, f"--attempts must be at least 1, not {attempts}.")
    out, job = Path(out), variables.get("LMCORE_JOB_ID")
    require(job is not None, "This is for jobs, to queue themselves again: papermill_jobs/job.sh calls it.")
    file = jobs_folder(out) / f"{job}.progress.json"
    before, now = last_stop(file), own_progress(out, variables)
    vain = 0 if got_somewhere(before["found"], now) else before["vain"] + 1
    write_json(file, {"time_utc": datetime.now(UTC).isoformat(timespec="seconds"), "vain": vain, "found": now})
    if vain >= attempts:
        append_state(out, job, "gave up")
        return False
    append_state(out, job, "requeued")
    if variables.get("SLURM_JOB_ID"):
        try:
            slurm_requeue(job)
        except Refused:
            append_state(out, job, "gave up")
            raise
    return True


def last_stop(file: Path) -> dict[str, Any]:
    """What was there when the job was stopped before; nothing if that is unknown."""
    nothing: dict[str, Any] = {"vain": 0, "found": {}}
    try:
        values = read_json(file)
    except UserError:
        return nothing
    whole = isinstance(values, dict) and isinstance(values.get("vain"), int) and isinstance(values.get("found"), dict)
    return values if whole and all(isinstance(count, int) for count in values["found"].values()) else nothing
