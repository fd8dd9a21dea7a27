"""Runs the exercises of one notebook and writes what they gave, a line of JSON each; `exercises` starts it.

Nothing is judged here: a hand-in could change the judge, which is why its outcomes go to another process as plain data.
"""

import ast
import json
import linecache
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbook.exercises.checking import attempt, judge_outcomes
from workbook.exercises.exercise import EXERCISES
from workbook.notebook import code_cells, read_notebook

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def main() -> None:
    """`python -m workbook.grading.attempt NOTEBOOK CHECKS DONE FILE`: `Checks` as JSON, verdicts known already."""
    notebook, checks, done, file = sys.argv[1:]
    run(read_notebook(notebook), json.loads(checks), json.loads(done), os.open(file, os.O_WRONLY | os.O_APPEND))


def run(notebook: Any, checks: dict[str, Any], done: dict[str, bool], lines: int) -> None:
    """Goes through the cells: of an exercise's all is executed, of others what they import and define.

    In place of a cell that checks stands our own, by its id. As in the notebook, what is not right is replaced by the
    library's; whether it is right counts for nothing else here.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    unread, waiting = "", dict(checks["checks"])
    cells = [cell for _, cell in code_cells(notebook)]
    for number, cell in enumerate([*cells, None], 1):
        if cell is None:  # the end: check cells that are gone
            for check in waiting.values():
                try_one(check, namespace, done, lines, unread)
        elif cell.get("id") in waiting:
            try_one(waiting.pop(cell.id), namespace, done, lines, unread)
        else:
            try:
                statements = ast.parse(cell.source).body
            except SyntaxError as error:
                unread += f"; code cell {number} is no Python: {error.msg}"
                continue
            file = f"<cell {number}>"
            linecache.cache[file] = (len(cell.source), None, cell.source.splitlines(True), file)  # a kernel's is read
            for statement in statements:
                if cell.get("id") in checks["cells"] or isinstance(statement, DEFINITIONS):
                    with suppress(Exception):  # what is missing then is told by its name
                        exec(compile(ast.Module([statement], []), file, "exec"), namespace)


def try_one(check: dict[str, str], namespace: dict[str, Any], done: dict[str, bool], lines: int, unread: str) -> None:
    """Runs a solution on the exercise's cases and writes what it gave."""
    exercise, passed = EXERCISES[check["name"]], done.get(check["name"])
    if passed is None:
        os.write(lines, json.dumps({"begin": exercise.name}).encode() + b"\n")
        try:
            found = attempt(exercise, eval(check["solution"], namespace))
        except NameError as error:
            found = f"There is no {check['solution']} ({error}){unread}."
        os.write(lines, json.dumps({"name": exercise.name, "found": pack(found)}).encode() + b"\n")
        passed = not isinstance(found, str) and judge_outcomes(exercise, found).passed
    if not passed and check["target"]:
        with suppress(Exception):
            exec(f"{check['target']} = answer", namespace | {"answer": exercise.answer}, namespace)


def pack(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Tensor):
        flat = value.detach().flatten()
        numbers = flat.double() if flat.is_floating_point() else flat
        return {"tensor": numbers.tolist(), "shape": list(value.shape), "dtype": str(value.dtype).partition(".")[2]}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"items": [[pack(key), pack(of)] for key, of in value.items()]}
    if isinstance(value, list | tuple):
        return [pack(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, bool | int | float | str | None) else {"other": repr(value)[:200]}


def unpack(value: Any) -> Any:
    """What `pack` was given; tuples come back as lists, and what is none of these as text."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    if "array" in value:
        return np.asarray(value["array"])
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    return {_key(k): unpack(v) for k, v in value["items"]} if "items" in value else value.get("other")


def _key(packed: Any) -> Any:
    key = unpack(packed)
    return tuple(key) if isinstance(key, list) else key


if __name__ == "__main__":
    main()
