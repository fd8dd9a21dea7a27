"""`workbook student`: the edition without solutions, outputs, answers and our results."""

import ast
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import tyro

from lmcore.errors import require
from workbook.handin import project_files
from workbook.notebook import EXERCISE, clean, read_notebook, tags, write_notebook
from workbook.parameters import find_project

LEFT_OUT = (
    "writeup/", "results/", "benchmarks/", "tests/", "figures/h", ".ci/", ".github/", "docs/", "CHANGELOG", "README",
    "Makefile", "CONTRIBUTING",
)  # fmt: skip
"""Beginnings of the paths that are the project's own: what it measured, and how it is kept sound."""

SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION *\n?", re.MULTILINE | re.DOTALL)
"""What stands between the markers, which nbgrader knows as well."""


def student(to: Annotated[Path, tyro.conf.Positional] = Path("student")) -> int:
    """Write the edition for students: no solutions, outputs, answers or results of ours.

    Args:
        to: The new folder; one that is there may hold somebody's solutions.
    """
    require(not to.exists(), f"{to} is there already: choose another folder, or remove it.")
    project = find_project()
    edition = project / "docs" / "student"  # README.md, AGENTS.md, Makefile and test of the edition
    made = {path.relative_to(edition): path for path in sorted(edition.rglob("*")) if path.is_file()}
    kept, _ = project_files(project, made=(to,))
    made |= {name: project / name for name in kept if not name.as_posix().startswith(LEFT_OUT)}
    made[Path("tests/adapters.py")] = project / "tests" / "adapters.py"
    for name, source in made.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if name.suffix == ".ipynb":
            write_notebook(to / name, without_solutions(read_notebook(source)))
        else:
            shutil.copy(source, to / name)
    print(f"{to}: {len(made)} files, of which {sum(name.suffix == '.ipynb' for name in made)} are notebooks.")
    return 0


def without_solutions(notebook: Any) -> Any:
    """The notebook with stubs for solutions, no outputs, and answers that are to be written."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata["tags"] = [tag for tag in tags(cell) if tag not in ("keep_output", "nbval-check-output")]
            if EXERCISE in tags(cell):
                cell.source = SOLUTION.sub(_stub, cell.source).rstrip()
                cell.metadata["tags"].remove("hide-input")
            cell.source = without_answers(cell.source)
    return clean(notebook)


def _stub(found: re.Match) -> str:
    indent = found[1]
    return f"{indent}raise NotImplementedError  # your solution\n" if indent else "# your solution\n"


def without_answers(source: str) -> str:
    """A cell's source in which the text of `answer(problem, text)` is to be written: `answer(problem, ...)`.

    So is what a loop over the courses keeps for it: `texts[course] = ...`.
    """
    left = source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "answer":
            problem = ast.get_source_segment(source, node.args[0])
            left = left.replace(ast.get_source_segment(source, node), f"answer({problem}, ...)")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "texts[course]":
            value = ast.get_source_segment(source, node.value)
            left = left if value.startswith("answer(") else left.replace(value, "...")
    return left
