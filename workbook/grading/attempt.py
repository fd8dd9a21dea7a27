"""Runs the exercises of one notebook and saves what they gave, a file each; `exercises` starts it.

Nothing is judged here: a hand-in could change the judge, which is why its outcomes go to another process as plain data.
"""

import ast
import json
import linecache
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from workbook.exercises.checking import attempt, judge_outcomes
from workbook.exercises.exercise import EXERCISES
from workbook.notebook import code_cells, read_notebook

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def run(notebook: str, checks: dict[str, Any], done: dict[str, bool], seconds: float) -> None:
    """Goes through the cells: of an exercise's all is executed, of others what they import and define.

    In place of a cell that checks stands our own, by its id. As in the notebook, what is not right is replaced by the
    library's; whether it is right counts for nothing else here. `done` has the verdicts that are known.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    waiting = dict(checks["checks"])
    for number, cell in code_cells(read_notebook(notebook)):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, whatever a cell catches
        if check := waiting.pop(cell.get("id"), None):
            try_one(check, namespace, done)
        else:
            define(cell.source, f"<cell {number}>", namespace, cell.get("id") in checks["cells"])
    for check in waiting.values():  # whose cells are gone
        try_one(check, namespace, done)


def define(source: str, file: str, namespace: dict[str, Any], everything: bool) -> None:
    """Executes what a cell imports and defines, or everything. What fails is missed later, by its name."""
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # a kernel's is read
    with suppress(SyntaxError):
        for statement in ast.parse(source).body:
            if everything or isinstance(statement, DEFINITIONS):
                with suppress(Exception):
                    exec(compile(ast.Module([statement], []), file, "exec"), namespace)


def try_one(check: dict[str, str], namespace: dict[str, Any], done: dict[str, bool]) -> None:
    """Runs a solution on the exercise's cases and saves what it gave; until then, its file is empty."""
    exercise, passed = EXERCISES[check["name"]], done.get(check["name"])
    if passed is None:
        Path(exercise.name).touch()
        try:
            found = attempt(exercise, eval(check["solution"], namespace))
        except NameError as error:
            found = f"There is no {check['solution']}: {error}."
        torch.save(tree_map(plain, found), exercise.name)
        passed = not isinstance(found, str) and judge_outcomes(exercise, found).passed
    if not passed and check["target"]:
        with suppress(Exception):
            exec(f"{check['target']} = answer", namespace | {"answer": exercise.answer}, namespace)


def plain(value: Any) -> Any:
    """What `torch.load` takes with `weights_only`: NumPy's numbers as tensors, and tensors that are no views."""
    value = torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
