"""Runs the code cells of a notebook in this process, and looks into the calls of `answer` in its source.

`python tests/notebook_cells.py 03_generate ...` writes the answers that the committed records give into
results/h200/answers.json, with which the tests compare.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from workbook.notebook import code_cells, read_notebook
from workbook.parameters import PARAMETERS_FOLDER, read_mapping
from workbook.report.answers import METADATA_KEY

PROJECT = Path(__file__).parents[1]
RECORDS = PROJECT / "results" / "h200"
ANSWERS = RECORDS / "answers.json"

NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$|\b(?:b?float|bf|fp|tf|int|uint)\d+|\b(?:GPT|FlashAttention|L|H|CSE|CS|UTF)-?\d\w*|\b\d-gram"
)
"""What a template may hold digits for: code, links, formulas, data types, names of models, caches and GPUs."""


def rendered(name: str, out: Path) -> dict[str, dict[str, Any]]:
    """The answers of a notebook at scale gpu from the committed records, by "problem (part)": text, what holds."""
    parameters = read_mapping(PROJECT / PARAMETERS_FOLDER / "gpu" / f"{name}.yaml")
    parameters |= {"out": str(out), "records": str(RECORDS)}
    variables: dict[str, Any] = {"__name__": "__main__"}
    answers, here = {}, Path.cwd()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for number, cell in code_cells(read_notebook(PROJECT / "notebooks" / f"{name}.ipynb")):
                tree, file = ast.parse(cell.source), f"<{name}, code cell {number}>"
                linecache.cache[file] = len(cell.source), None, cell.source.splitlines(True), file  # for getsource
                last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
                exec(compile(tree, file, "exec"), variables)
                if number == 1:
                    variables |= parameters
                shown = eval(compile(ast.Expression(last.value), file, "eval"), variables) if last else None
                if METADATA_KEY in (getattr(shown, "metadata", None) or {}):
                    found = shown.metadata[METADATA_KEY]
                    problem = f"{found['problem']} ({found['part']})" if found["part"] else found["problem"]
                    answers[problem] = {key: found[key] for key in ("text", "holds", "missing") if found[key]}
    finally:
        os.chdir(here)
    wrong = [line for line in printed.getvalue().splitlines() if line.startswith("✗") and "not checked:" not in line]
    assert not wrong, f"solutions that their own checks refuse: {wrong}"
    return answers


def cells_of(name: str) -> dict[str, str]:
    """The sources of a notebook's code cells by their ids."""
    return {cell.id: cell.source for _, cell in code_cells(read_notebook(PROJECT / "notebooks" / f"{name}.ipynb"))}


def answer_calls(name: str) -> list[ast.Call]:
    """Every call of `answer` in a notebook's code."""
    nodes = [node for source in cells_of(name).values() for node in ast.walk(ast.parse(source))]
    return [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "answer"]


def template_of(call: ast.Call) -> str:
    """The text of an answer as it was typed: of an f-string, what is not a field."""
    text = call.args[1]
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(part.value for part in parts if isinstance(part, ast.Constant))


def typed_numbers(template: str) -> list[str]:
    """Numbers that stand in a template's text, outside of its fields and of names."""
    return re.findall(r"\d+(?:[.,]\d+)*", NAMES.sub("", template))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = {name: rendered(name, Path(folder)) for name in sys.argv[1:]}
    committed = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    committed |= made
    ANSWERS.write_text(json.dumps(committed, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
