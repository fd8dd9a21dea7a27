"""A hand-in's answers from its tables, its tables from the records of its runs, and the last steps of a run again."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lmcore.files import temporary_folder
from lmcore.run import RunFolder
from workbook.grading.exercises import Limits, end_group
from workbook.notebook import INJECTED, clean, read_notebook, tags, write_notebook
from workbook.record import read_record, source_hash
from workbook.report.contents import given_answers
from workbook.report.results import RECOMPUTE

REPLAY = """import sys
from lmcore.config import replace
from lmcore.run import RunFolder
from lmcore.train import train
train(replace(RunFolder(sys.argv[1]).config(), data=sys.argv[2], device="cpu"), sys.argv[1])"""

SAME = 1e-3
"""Largest relative difference between a loss and the one of the same step replayed, maybe on another machine."""


def recomputed_answers(out: Path, name: str, project: Path, limits: Limits) -> Iterator[tuple[str, str]]:
    """Problem and sentence for each answer of the notebook that is not what its tables give; "" as the problem of what
    concerns the whole notebook.

    Its cells are executed again from the hand-in's tables, in a clean kernel with limits, with our own package.
    """
    executed, record = read_notebook(out / "notebooks" / f"{name}.ipynb"), read_record(out, name)
    with temporary_folder("lmcore-grade-") as folder:
        source = clean(executed)
        source.cells = [cell for cell in source.cells if INJECTED not in tags(cell)]
        write_notebook(folder / "notebooks" / f"{name}.ipynb", source)
        if record is None or record.source != source_hash(folder / "notebooks" / f"{name}.ipynb"):
            yield "", f"Notebook {name} is not the one that its record says was executed."
        shutil.copytree(project / "papermill_jobs", folder / "papermill_jobs")
        shutil.copytree(out / "runs", folder / "out" / "runs", dirs_exist_ok=True) if (out / "runs").is_dir() else None
        given = record.parameters if record and record.parameters else {}
        kept = {key: value for key, value in given.items() if key not in ("out", "records", "data", "scale")}
        parameters = kept | {"records": str((out / "results").resolve())}
        command = [sys.executable, "-m", "workbook", "run", "--no-writeup", "--notebooks", name, "--out", "out"]
        command += ["--scale", given.get("scale", "smoke"), "--stop-seconds", "5", "--parameters"]
        command += [f"{key}={value!r}" for key, value in parameters.items()]
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {RECOMPUTE: "1"}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        limits.hold(process)
        try:
            process.wait(limits.seconds * 5)
        except subprocess.TimeoutExpired:
            process.terminate()  # ends the kernel, too
            process.wait(30)
            yield "", f"Notebook {name} took longer than {limits.seconds * 5:g} s."
        finally:
            end_group(process)
        again = read_record(folder / "out", name)
        if again and again.unfinished:
            yield "", again.unfinished
        target = folder / "out" / "notebooks" / f"{name}.ipynb"
        found = given_answers(read_notebook(target)) if target.exists() else {}
        for problem, text in given_answers(executed).items():
            if found.get(problem) != text and problem in found:
                yield problem, f"{problem} says {_apart(text, found[problem])}"


def _apart(text: str, again: str) -> str:
    """Where two texts differ, with a few words around."""
    at = next((i for i, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), 0)
    start = max(text.rfind(" ", 0, max(at - 20, 0)), 0)
    return f"“…{text[start : at + 40]}…”, and its tables give “…{again[start : at + 40]}…”."


def replayed(out: Path, limits: Limits) -> tuple[bool | None, str]:
    """Trains the last steps of one run again from its checkpoint: whether their losses are those handed in.

    None where the hand-in has no checkpoint with its data, or where it would take too long.
    """
    runs = [run for run in map(RunFolder, sorted((out / "runs").glob("*"))) if run.checkpoints()]
    if not runs or not (out / "data").is_dir():
        return None, "No run has a checkpoint and its data in the hand-in: nothing was replayed."
    run = runs[0]
    with temporary_folder("lmcore-replay-") as folder:
        copy = folder / run.name
        shutil.copytree(run, copy)
        (copy / "status.json").unlink(missing_ok=True)
        command = [sys.executable, "-c", REPLAY, str(copy), str((out / "data").resolve())]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        limits.hold(process)
        try:
            said = process.communicate(timeout=limits.seconds * 5)[1]
        except subprocess.TimeoutExpired:
            return None, f"{run.name} was not replayed: it takes longer than {limits.seconds * 5:g} s."
        finally:
            end_group(process)
        if process.returncode:
            return False, f"{run.name} cannot be replayed: {(said.strip().splitlines() or ['it was killed'])[-1]}"
        again = {line["step"]: line for line in RunFolder(copy).metrics_lines()}
    first = max(int(file.stem.partition("_")[2]) for file in run.checkpoints())
    steps = 0
    for line in run.metrics_lines():
        for key in ("train_loss", "valid_loss"):
            given, found = line.get(key), again.get(line["step"], {}).get(key)
            if line["step"] > first and given is not None:
                if found is None or not math.isclose(given, found, rel_tol=SAME):
                    return (
                        False,
                        f"{run.name}: step {line['step']} has {key} {given:.4g}; replayed, it is {found or 0:.4g}.",
                    )
                steps += 1
    return steps > 0, f"{run.name}: {steps} losses after step {first} were replayed."
