"""How far the work in an output folder is, from its files alone: notebooks, training runs, sweeps.

The files belong to processes on other machines that write them at this moment, or died while they did. What cannot be
read is left out: the reader is `lmcore jobs`, which shows what there is. PyTorch is not needed for that, nor imported.
"""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import FINISHED

TAIL_BYTES = 1 << 18
"""So much of the end of a file is read."""

NOT_RUN_FOLDERS = {"checkpoints", "notebooks", "figures", "results", "writeup", "jobs", "timelines", "cells"}
SILENT_INTERVALS, SILENT_SECONDS = 10, 60
"""A run is silent that has not written for so many times its usual interval, and for so long."""


@dataclass(frozen=True)
class Work:
    """A notebook or a training run in the hands of a job."""

    name: str
    state: str
    job: str | None
    """The job that last worked on it, as far as it said so."""
    words: str
    """How far it is."""
    changed: float = 0.0
    """When a run wrote its last line, in seconds since the epoch."""
    seconds_left: float | None = None
    """Of a run; None where no rate is known."""


def read_notebooks(out: Path) -> list[Work]:
    """The notebooks that were started in the output folder, in their order: 02_train, cell 3/5."""
    found = []
    for path in sorted((out / "notebooks").glob("*.json")):
        record = read_object(path)
        if isinstance(state := record.get("state"), str):
            running, cells = executed_cells(path.with_suffix(".ipynb"))
            cell = record.get("cell") or running
            words = f"{path.stem}, cell {cell}/{cells}" if cell else path.stem
            words = words if state == "running" else f"{path.stem} {state} at cell {cell}/{cells}"
            found.append(Work(path.stem, state, job_of(record), words))
    return found


def executed_cells(path: Path) -> tuple[int | None, int | None]:
    """Of a notebook that papermill writes: the code cell that runs, from 1, and how many there are; None: not known."""
    ended = []
    try:
        for cell in read_object(path).get("cells", []):
            metadata = cell.get("metadata", {})
            if cell["cell_type"] == "code" and "injected-parameters" not in metadata.get("tags", []):
                ended.append(metadata.get("papermill", {}).get("status") in ("completed", "failed"))
    except (AttributeError, KeyError, TypeError):  # some other JSON
        return None, None
    if not ended:
        return None, None
    return (ended.index(False) + 1 if False in ended else len(ended)), len(ended)


def read_runs(out: Path) -> list[Work]:
    """The training runs in the output folder, the one that was last written to first."""
    runs = []
    for place, folders, files in os.walk(out):
        folders[:] = [name for name in folders if name not in NOT_RUN_FOLDERS and not name.startswith(".")]
        if "status.json" in files and (run := read_run(Path(place))) is not None:
            runs.append(run)
    return sorted(runs, key=lambda run: -run.changed)


def read_run(folder: Path) -> Work | None:
    """One run, with its step, loss and rate since it was last started; None where its files do not tell."""
    status, steps = read_object(folder / "status.json"), read_object(folder / "config.json").get("steps")
    state, step = status.get("state"), status.get("step")
    if not isinstance(step, int) or not isinstance(state, str):
        return None
    lines = last_lines(folder / "metrics.jsonl")
    own = [line for line in lines if line["step"] > step and is_number(line.get("seconds"))]
    seconds = own[-1]["seconds"] - own[0]["seconds"] if own else 0.0
    changed = modified(folder / "metrics.jsonl") or modified(folder / "status.json")
    rate = left = None
    if state == "running" and lines:
        step = max(step, lines[-1]["step"])
        rate = max(own[-1]["step"] - own[0]["step"], 0) / seconds if seconds > 0 else None
    words = [f"step {step:,}/{steps:,}" if isinstance(steps, int) else f"step {step:,}"]
    if lines and is_number(lines[-1].get("train_loss")):
        words.append(f"loss {lines[-1]['train_loss']:.3f}")
    if rate:
        words.append(f"{rate:.3g} steps/s")
    since = time.time() - changed
    if since > max(SILENT_SECONDS, SILENT_INTERVALS * seconds / max(len(own) - 1, 1)):
        words.append(f"nothing new for {format_duration(since)}")
    elif rate and isinstance(steps, int):
        left = max(0.0, (steps - step) / rate - since)
    return Work(folder.name, state, job_of(status), f"{named(folder)}: {', '.join(words)}", changed, left)


def named(folder: Path) -> str:
    """A run's name, and of one of a sweep how many of its runs are finished: lr_0.1 (rates 1/3 done)."""
    runs = read_object(folder.parent / "sweep.json")
    if folder.name not in runs:
        return folder.name
    done = sum(read_object(folder.parent / name / "status.json").get("state") in FINISHED for name in runs)
    return f"{folder.name} ({folder.parent.name} {done}/{len(runs)} done)"


def job_of(record: dict[str, Any]) -> str | None:
    """The job that a record names."""
    return None if record.get("job") is None else str(record["job"])


def is_number(value: Any) -> bool:
    """Whether this is a finite number, which JSON's NaN and Infinity are not."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The objects with a step that the end of a metrics file holds; broken lines are left out."""
    found = []
    for text in tail_text(path).splitlines():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            found.append(value)
    return found


def tail_text(path: Path, size: int = TAIL_BYTES) -> str:
    """The end of a text file, from the beginning of a line; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - size))
            content = file.read(size)
    except OSError:
        return ""
    return (content if length <= size else content.partition(b"\n")[2]).decode(errors="replace")


def modified(path: Path) -> float:
    """When the file was changed, in seconds since the epoch; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def format_duration(seconds: float) -> str:
    """A duration as Slurm writes it: 4:05, 1:02:33, 2-03:00:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
