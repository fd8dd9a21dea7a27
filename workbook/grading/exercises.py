"""The exercises of a hand-in, run again in a process with limits and judged here, by our own notebooks' checks."""

import json
import re
import signal
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from lmcore.errors import require
from lmcore.files import temporary_folder
from workbook.exercises.checking import Verdict, judge_outcomes
from workbook.exercises.exercise import EXERCISES
from workbook.exercises.solutions import CHECK_CALL
from workbook.grading.limits import TOOK_LONGER, Limits
from workbook.notebook import CHECK, EXERCISE, code_cells, read_notebook, tags

REFUSED = {"lmcore", "workbook", "importlib", "__import__", "eval", "exec", "setprofile", "settrace", "inspect", "gc"}
"""Names that the cell of an exercise may not have: by them, the answer could be had without writing it."""

MOST_NUMBERS = 10_000_000
"""In the outcomes of one exercise."""

Checks = dict[str, Any]
"""Of one of our own notebooks: `cells` has the ids of those that a reader writes; `checks`, by the id of the cell that
checks, the `name` of the exercise, the `solution` that is checked, and the `target` that is bound to the verdict."""


def checks_of(notebook: Path) -> Checks:
    """What our notebook checks; a hand-in's own check cells are never looked at."""
    cells = [cell for _, cell in code_cells(read_notebook(notebook))]
    calls = {cell.id: CHECK_CALL.search(cell.source) for cell in cells if CHECK in tags(cell)}
    checks = {key: call.groupdict() for key, call in calls.items() if call}
    return {"cells": [cell.id for cell in cells if EXERCISE in tags(cell)], "checks": checks}


def grade_exercises(notebook: Path, checks: Checks, limits: Limits) -> dict[str, Verdict]:
    """A verdict for each exercise in a notebook of a hand-in.

    A process that dies or takes too long costs the exercise that it was at; the others run in a new one. Between two
    exercises, it costs all that are left.
    """
    names = [check["name"] for check in checks["checks"].values()]
    verdicts = refused(notebook, checks)
    with temporary_folder("lmcore-grade-") as folder:
        while left := [name for name in names if name not in verdicts]:
            done = {name: verdict.passed for name, verdict in verdicts.items()}
            given = {"notebook": str(notebook.resolve()), "checks": checks, "done": done, "seconds": limits.seconds}
            code, error = limits.run(["-m", "workbook.grading.attempt", json.dumps(given)], folder)
            begun = [name for name in left if (folder / name).exists()]
            verdicts |= {name: judge(name, folder / name) for name in begun if (folder / name).stat().st_size}
            words = f"Its process ended with {code}. {error}"
            if code in (TOOK_LONGER, -signal.SIGPROF):
                words = f"It took longer than {limits.seconds:g} s."
            stopped_at = [name for name in begun if name not in verdicts]
            verdicts = dict.fromkeys(stopped_at or left, Verdict(False, words)) | verdicts
    return {name: verdicts[name] for name in names}


def refused(notebook: Path, checks: Checks) -> dict[str, Verdict]:
    """Verdicts on exercises whose cell names what would be the answer itself."""
    verdicts = {}
    for _, cell in code_cells(read_notebook(notebook)):
        words = set(re.findall(r"\w+", cell.source))
        if words & REFUSED and cell.get("id") in checks["cells"]:
            for check in checks["checks"].values():
                if words & set(re.findall(r"\w+", check["solution"])):
                    sentence = f"The cell has {', '.join(sorted(words & REFUSED))}: write it without."
                    verdicts[check["name"]] = Verdict(False, sentence)
    return verdicts


def judge(name: str, file: Path) -> Verdict:
    """A verdict on what an attempt saved: tensors, numbers, text, lists and dictionaries. Nothing of it is executed."""
    try:
        with zipfile.ZipFile(file) as archive:
            require(sum(member.file_size for member in archive.infolist()) <= MOST_NUMBERS * 8, "large")
        found = torch.load(file, weights_only=True)
        leaves = islice(tree_iter(found), MOST_NUMBERS + 1)  # a tensor may repeat one number, and a list itself
        require(sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in leaves) <= MOST_NUMBERS, "large")
        return Verdict(False, found) if isinstance(found, str) else judge_outcomes(EXERCISES[name], found)
    except Exception:  # of the many that these raise, from BadZipFile to UnpicklingError
        return Verdict(False, "The result is too large, or no plain data: numbers, text, tensors, lists, dictionaries.")
