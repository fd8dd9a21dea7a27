"""A hand-in's answers from its tables, its tables from the records of its runs, and the last steps of a run again."""

import math
import shutil
from pathlib import Path
from typing import Any

from lmcore.errors import EXIT_CODES
from lmcore.files import temporary_folder
from lmcore.run import RunFolder
from workbook.grading.limits import TOOK_LONGER, Limits
from workbook.notebook import INJECTED, clean, read_notebook, tags, write_notebook
from workbook.record import NotebookRecord, read_record, source_hash
from workbook.report.contents import given_answers
from workbook.report.results import RECOMPUTE

LOSSES = ("train_loss", "valid_loss")

SAME = 1e-3
"""Largest relative difference between a loss and the one of the same step replayed, maybe on another machine."""

SHOWN = ("image/svg+xml", "image/png", "text/markdown")


def execute_again(out: Path, record: NotebookRecord, executed: Any, project: Path, limits: Limits) -> tuple[Any, str]:
    """A notebook of the hand-in, executed again from its tables, and a sentence on what is wrong with it, or "".

    It runs in a clean kernel with limits, with our own package. Its tables are made again from the records of runs,
    unless the notebook was executed with another machine's tables.
    """
    name, given = record.name, record.parameters or {}
    with temporary_folder("lmcore-grade-") as folder:
        source, file = clean(executed), folder / "notebooks" / f"{name}.ipynb"
        source.cells = [cell for cell in source.cells if INJECTED not in tags(cell)]
        write_notebook(file, source)
        if record.source != source_hash(file):
            return source, f"Notebook {name} is not the one that its record says was executed."
        shutil.copytree(project / "papermill_jobs", folder / "papermill_jobs")
        if (out / "runs").is_dir():
            shutil.copytree(out / "runs", folder / "out" / "runs")
        kept = {key: value for key, value in given.items() if key not in ("out", "records", "data", "scale")}
        command = ["-m", "workbook", "run", "--no-writeup", "--notebooks", name, "--out", "out", "--stop-seconds", "5"]
        command += ["--scale", given.get("scale", "smoke"), "--parameters", f"records={out / 'results'}"]
        command += [f"{key}={value!r}" for key, value in kept.items()]
        code, error = limits.run(command, folder, **({} if given.get("records") else {RECOMPUTE: "1"}))
        again, target = read_record(folder / "out", name), folder / "out" / "notebooks" / file.name
        fault = again.unfinished or "" if again else f"Notebook {name} cannot be executed again: {error}"
        fault = f"Notebook {name} took longer than {limits.seconds * 5:g} s." if code == TOOK_LONGER else fault
        return read_notebook(target if target.exists() else file), fault


def different_answers(executed: Any, again: Any) -> dict[str, str]:
    """A sentence on each answer that the notebook does not give when it is executed again, by problem and part."""
    found, different = given_answers(again), {}
    for problem, text in given_answers(executed).items():
        if problem not in found:
            different[problem] = f"{problem} is not answered when the notebook is executed again."
        elif found[problem] != text:
            different[problem] = f"{problem} says {_apart(text, found[problem])}"
    return different


def _apart(text: str, again: str) -> str:
    """Where two texts differ, with a few words around."""
    at = next((i for i, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), 0)
    around = slice(max(at - 40, 0), at + 40)
    return f"“…{text[around]}…”, and its tables give “…{again[around]}…”."


def different_cells(executed: Any, again: Any) -> list[str]:
    """Numbers of the cells whose pictures or tables are others when the notebook is executed again."""
    given, found = shown(executed), shown(again)
    return [str(number) for number, key in enumerate(given, 1) if found.get(key, given[key]) != given[key]]


def shown(notebook: Any) -> dict[str, list[str]]:
    """The pictures and the Markdown of each cell, by its id."""
    data = {cell.get("id"): [each.get("data", {}) for each in cell.get("outputs", [])] for cell in notebook.cells}
    return {key: [each[kind] for each in outputs for kind in SHOWN if kind in each] for key, outputs in data.items()}


def replayed(out: Path, limits: Limits) -> tuple[bool, str]:
    """Trains the last steps of one run again from its checkpoint: whether their losses are not others, and a sentence.

    Nothing is trained where the hand-in has no checkpoint with its data.
    """
    runs = [run for run in map(RunFolder, sorted((out / "runs").glob("*"))) if run.checkpoints()]
    if not runs or not (out / "data").is_dir():
        return True, "No run has a checkpoint and its data in the hand-in: nothing was replayed."
    run = runs[0]
    given, first = losses(run), max(int(file.stem.partition("_")[2]) for file in run.checkpoints())
    run.status_file.unlink(missing_ok=True)  # or it is complete
    command = ["-m", "lmcore", "train", "--config", run.config_file, "--run", run.path, "--data", out / "data"]
    code, error = limits.run([*map(str, command), "--device", "cpu"], out)
    if code not in EXIT_CODES.values():
        return code == TOOK_LONGER, f"{run.name} was not replayed: {error or f'the process ended with {code}'}"
    again = losses(run)
    given = {key: loss for key, loss in given.items() if key[0] > first}
    for (step, name), loss in given.items():
        found = again.get((step, name), math.nan)
        if not math.isclose(loss, found, rel_tol=SAME):
            return False, f"{run.name}: step {step} has {name} {loss:.4g}; replayed, it is {found:.4g}."
    return True, f"{run.name}: {len(given)} losses after step {first} were replayed."


def losses(run: RunFolder) -> dict[tuple[int, str], float]:
    """What a run logged, by step and name."""
    lines = run.metrics_lines()
    return {(line["step"], name): line[name] for line in lines for name in LOSSES if line.get(name) is not None}
