"""Runs the code cells of a notebook in this process, and looks into the calls of `answer` in its source."""

import ast
import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

from lmcore.workbook.notebook import code_cells, read_notebook
from lmcore.workbook.report.answers import METADATA_KEY, Answer

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run_cells(name: str, **parameters: Any) -> dict[str, dict[str, Any]]:
    """Runs the notebook with these parameters; its answers' metadata by "problem (part)"."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    answers, here = {}, Path.cwd()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for number, cell in code_cells(read_notebook(NOTEBOOKS / f"{name}.ipynb")):
                tree = ast.parse(cell.source, f"{name}, code cell {number}")
                last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
                exec(compile(tree, tree and f"{name}, code cell {number}", "exec"), variables)
                if number == 1:
                    variables |= parameters
                if last is not None:
                    shown = eval(compile(ast.Expression(last.value), f"{name}, code cell {number}", "eval"), variables)
                    if isinstance(shown, Answer):
                        found = shown.metadata[METADATA_KEY]
                        answers[f"{found['problem']} ({found['part']})" if found["part"] else found["problem"]] = found
    finally:
        os.chdir(here)
    return answers


def answer_calls(name: str) -> list[ast.Call]:
    """Every call of `answer` in a notebook's code."""
    calls = []
    for _, cell in code_cells(read_notebook(NOTEBOOKS / f"{name}.ipynb")):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "answer":
                calls.append(node)
    return calls


NAMES = re.compile(
    r"`[^`]*`|\$[^$]*\$|\b(?:float|bf|fp|tf|int|uint)\d+|\b(?:GPT|FlashAttention|L|CSE|CS)-?\d\w*|\b\d-gram"
)
"""What a template may hold digits for: code, formulas, data types, names of models and caches."""


def typed_numbers(template: str) -> list[str]:
    """Numbers that stand in a template's text, outside of its fields and of names."""
    text = re.sub(r"\{\{|\}\}", "", template)
    return re.findall(r"\d[\d.,]*", NAMES.sub("", re.sub(r"\{[^{}]*\}", "", text)))
