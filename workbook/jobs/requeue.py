"""A job that was stopped by its time limit is queued again, unless it gets nowhere."""

from pathlib import Path

from lmcore.errors import require
from lmcore.files import read_json, write_json
from workbook.jobs.slurm import call

NO_PROGRESS = ("config.json", "environment.json", "status.json", "sweep.json")
"""Files that a start writes, not what it leads to."""


def saved(out: Path) -> set[str]:
    """What a stop does not lose: checkpoints, measurements, tables and finished notebooks, by their names."""
    found = {path for path in out.rglob("*.json") if path.name not in NO_PROGRESS and path.parent.name != "jobs"}
    found = {path for path in found if path.parent.name != "notebooks" or read_json(path)["state"] == "done"}
    return {str(path.relative_to(out)) for path in (*found, *out.rglob("checkpoints/step_*"))}


def requeue(out: Path, job: str, attempts: int) -> None:
    """Queues the job again. Raises `UserError` where `attempts` stops in a row have saved nothing new.

    A task of a sweep is judged by its own run.
    """
    task, sweep, folder = job.partition("_")[2], out / "sweep.json", out
    if task and sweep.exists():
        folder = out / list(read_json(sweep))[int(task)]
    file = out / "jobs" / f"{job}.json"
    before = read_json(file) if file.exists() else {"in_vain": 0, "saved": []}
    now = saved(folder)
    in_vain = 0 if now - set(before["saved"]) else before["in_vain"] + 1
    write_json(file, {"in_vain": in_vain, "saved": sorted(now | set(before["saved"]))})
    again = f"This job was stopped {in_vain} times in a row with nothing new saved, so it is not queued again"
    require(in_vain < attempts, f"{again}: give it a longer --time, or let it save more often (checkpoint_interval).")
    call("scontrol", "requeue", job)
