"""How far the work in an output folder is, from its files alone: notebooks, training runs, sweeps.

The files belong to processes on other machines that write them at this moment, or died while they did. What cannot be
read is left out here: the reader is `lmcore jobs`, which shows what there is. PyTorch is not needed for that, nor
imported.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 18
"""So much of the end of a file is read."""

NOT_RUN_FOLDERS = {"checkpoints", "notebooks", "figures", "results", "writeup", "jobs", "timelines", "cells"}
FINISHED = ("complete", "diverged", "out of memory")
SILENT_INTERVALS, SILENT_SECONDS = 10, 60
"""A run is silent that has not written for so many times its usual interval, and for so long."""


@dataclass(frozen=True)
class NotebookProgress:
    """A notebook in the hands of a job."""

    name: str
    state: str
    job: str | None = None
    """The job that last worked on it."""
    cell: int | None = None
    """Code cell that runs, or at which it ended, from 1."""
    cells: int | None = None


@dataclass(frozen=True)
class RunProgress:
    """A training run."""

    name: str
    state: str
    job: str | None
    step: int
    steps: int | None
    loss: float | None
    """Mean training loss in nats per token of its last line."""
    steps_per_second: float | None
    """Since the run was last started, evaluations and checkpoints included."""
    seconds_left: float | None
    """None where there is no rate to tell it from."""
    changed: float
    """Time of its last line, in seconds since the epoch."""
    silent_seconds: float | None = None
    """How long it has been silent, if that is unusually long."""
    sweep: str | None = None
    """Name of the sweep that it belongs to, with its finished runs: "learning_rate 3/8"."""


def read_notebooks(out: Path) -> list[NotebookProgress]:
    """The notebooks that were started in the output folder, in their order."""
    found = []
    for path in sorted((out / "notebooks").glob("*.json")):
        record = read_object(path)
        if record is None or not isinstance(record.get("state"), str):
            continue
        cell, cells = executed_cells(path.with_suffix(".ipynb"))
        found.append(
            NotebookProgress(
                name=path.stem,
                state=record["state"],
                job=None if record.get("job") is None else str(record["job"]),
                cell=record.get("cell") or cell,
                cells=cells,
            )
        )
    return found


def executed_cells(path: Path) -> tuple[int | None, int | None]:
    """Of a notebook that papermill writes: the code cell that runs, from 1, and how many there are; None: not known."""
    number, cells = None, 0
    try:
        for cell in (read_object(path) or {}).get("cells", []):
            metadata = cell.get("metadata", {})
            if cell["cell_type"] != "code" or "injected-parameters" in metadata.get("tags", []):
                continue
            cells += 1
            if number is None and metadata.get("papermill", {}).get("status") not in ("completed", "failed"):
                number = cells
    except (AttributeError, KeyError, TypeError):  # some other JSON
        return None, None
    return (number or cells, cells) if cells else (None, None)


def read_runs(out: Path) -> list[RunProgress]:
    """The training runs in the output folder, the one that was last written to first."""
    runs = (read_run(folder) for folder in run_folders(out))
    return sorted((run for run in runs if run is not None), key=lambda run: -run.changed)


def run_folders(folder: Path) -> Iterator[Path]:
    """Folders below `folder` that hold a run's status."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_RUN_FOLDERS and not name.startswith(".")]
        if "status.json" in files:
            yield Path(place)


def read_run(folder: Path) -> RunProgress | None:
    """One run, or None where its files do not tell."""
    status = read_object(folder / "status.json") or {}
    config = read_object(folder / "config.json") or {}
    started, steps = status.get("step"), config.get("steps")
    if not isinstance(started, int) or not isinstance(status.get("state"), str):
        return None
    lines = last_lines(folder / "metrics.jsonl")
    last = lines[-1] if lines else {}
    own = [line for line in lines if line["step"] > started and is_number(line.get("seconds"))]
    rate = rate_of(own) if status["state"] == "running" else None
    step = max(started, last.get("step", 0)) if status["state"] == "running" else started
    changed = modified(folder / "metrics.jsonl", folder / "status.json")
    silent = silence(own, changed)
    known = rate is not None and isinstance(steps, int) and silent is None
    return RunProgress(
        name=folder.name,
        state=status["state"],
        job=None if status.get("job") is None else str(status["job"]),
        step=step,
        steps=steps if isinstance(steps, int) else None,
        loss=last["train_loss"] if is_number(last.get("train_loss")) else None,
        steps_per_second=rate,
        seconds_left=max(0.0, (steps - step) / rate - (time.time() - changed)) if known else None,
        changed=changed,
        silent_seconds=silent,
        sweep=sweep_of(folder),
    )


def is_number(value: Any) -> bool:
    """Whether this is a finite number, which JSON's NaN and Infinity are not."""
    return isinstance(value, int | float) and math.isfinite(value)


def rate_of(lines: list[dict[str, Any]]) -> float | None:
    """Steps per second between the first and the last of a run's lines."""
    if len(lines) < 2:
        return None
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    steps = lines[-1]["step"] - lines[0]["step"]
    return steps / seconds if seconds > 0 and steps > 0 else None


def silence(lines: list[dict[str, Any]], changed: float) -> float | None:
    """Seconds since the last line, if that is far longer than the usual time between two."""
    since = time.time() - changed
    usual = (lines[-1]["seconds"] - lines[0]["seconds"]) / (len(lines) - 1) if len(lines) > 1 else 0.0
    return since if since > max(SILENT_SECONDS, SILENT_INTERVALS * usual) else None


def sweep_of(folder: Path) -> str | None:
    """The sweep that a run belongs to, and how many of its runs are finished."""
    runs = read_object(folder.parent / "sweep.json")
    if runs is None or folder.name not in runs:
        return None
    states = [(read_object(folder.parent / name / "status.json") or {}).get("state") for name in runs]
    return f"{folder.parent.name} {sum(state in FINISHED for state in states)}/{len(runs)}"


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
    content = content if length <= size else content.partition(b"\n")[2]
    return content.decode(errors="replace")


def modified(*paths: Path) -> float:
    """When the first of these files that is there was changed, in seconds since the epoch; 0 where none is."""
    for path in paths:
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def seconds_of(time_utc: str) -> float | None:
    """An ISO time as seconds since the epoch, or None if it is none."""
    try:
        return datetime.fromisoformat(time_utc).timestamp()
    except ValueError:
        return None


def format_duration(seconds: float) -> str:
    """A duration as Slurm writes it: 4:05, 1:02:33, 2-03:00:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe_run(run: RunProgress) -> str:
    """Name, step, loss and rate of a run."""
    sweep = f" ({run.sweep} done)" if run.sweep else ""
    steps = f"step {run.step:,}/{run.steps:,}" if run.steps else f"step {run.step:,}"
    loss = "" if run.loss is None else f", loss {run.loss:.3f}"
    rate = "" if run.steps_per_second is None else f", {run.steps_per_second:.3g} steps/s"
    silent = "" if run.silent_seconds is None else f", nothing new for {format_duration(run.silent_seconds)}"
    return f"{run.name}{sweep}: {steps}{loss}{rate}{silent}"
