"""What a workbook notebook must keep to, read from the file: parameters, execution order, committed outputs."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.errors import UserError
from lmcore.files import atomic_write

if TYPE_CHECKING:  # importing it takes longer than a second, in each kernel
    from nbformat import NotebookNode

ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
"""What a terminal takes as colours and movements."""

PARAMETERS, INJECTED = "parameters", "injected-parameters"
"""Tags of the cell that declares the parameters, and of the one that papermill puts after it."""

KEEP_OUTPUT, CHECK_OUTPUT = "keep_output", "nbval-check-output"
"""Tags of a cell whose output is deterministic: the output is committed, and nbval compares it."""

EXERCISE, CHECK = "exercise", "check"
"""Tags of a cell that a reader writes, and of the cell after it that checks it."""

CLEAN_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_METADATA = ("tags", "caption", "jupyter")
"""Metadata of a cell that an author sets; the rest is a run's or an editor's."""


def read_notebook(path: str | os.PathLike) -> "NotebookNode":
    """Reads a notebook of format 4. Raises `UserError` if it is missing or is not a notebook."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        _ = [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]  # other JSON has none of these
        return notebook
    except FileNotFoundError:
        raise UserError(f"There is no notebook {path}.") from None
    except Exception as error:  # of the many that nbformat raises, from NotJSONError to AttributeError
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read as a notebook ({said}).") from error


def tags(cell: "NotebookNode") -> list[str]:
    """Tags of a cell."""
    return cell.metadata.get("tags", [])


def code_cells(notebook: "NotebookNode") -> "Iterator[tuple[int, NotebookNode]]":
    """The code cells with their numbers, from 1, as the source notebook has them (papermill's own is left out)."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code" and INJECTED not in tags(cell))
    yield from enumerate(cells, 1)


def declared_parameters(notebook: "NotebookNode", name: str) -> dict[str, Any]:
    """Parameters and defaults in the first code cell, which must be tagged `parameters` and hold only literals.

    Raises `UserError` naming the notebook and the line that breaks the rule.
    """
    first = next((cell for _, cell in code_cells(notebook)), None)
    if first is None or PARAMETERS not in tags(first):
        raise UserError(f"{name}: the first code cell must carry the tag {PARAMETERS!r} and declare the parameters.")
    parameters: dict[str, Any] = {}
    try:
        for statement in ast.parse(first.source).body:
            line = statement.lineno
            (target,) = statement.targets
            parameters[target.id] = ast.literal_eval(statement.value)
    except (SyntaxError, AttributeError, ValueError, TypeError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else line
        raise UserError(f"{name}: line {line} of the parameters cell must be `name = literal`.") from None
    return parameters


def execution_fault(notebook: "NotebookNode") -> tuple[int, str] | None:
    """Number of the first code cell that failed, ended the notebook early or was not run, and what happened there.

    None if every code cell ran without an error. papermill itself takes SystemExit(0) for success.
    """
    for number, cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                message = ANSI_ESCAPE.sub("", output.evalue).strip()
                ending = "the cell ended the notebook early with " if output.ename == "SystemExit" else ""
                return number, f"{ending}{output.ename}: {message}" if message else f"{ending}{output.ename}"
        if cell.source.strip() and cell.execution_count is None:
            return number, "the cell was not run"
    return None


def clean(notebook: "NotebookNode") -> "NotebookNode":
    """The notebook as it is committed: outputs only in cells tagged `keep_output`, no run's metadata.

    A cell that keeps outputs has the execution count 1, since nbval fails cells that have outputs and were never run.
    """
    import nbformat

    cleaned = nbformat.from_dict(notebook)
    for cell in cleaned.cells:
        if cell.cell_type == "code":
            cell.outputs = cell.outputs if KEEP_OUTPUT in tags(cell) else []
            cell.execution_count = 1 if cell.outputs else None
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_METADATA})
    cleaned.metadata = nbformat.from_dict(CLEAN_METADATA)
    return cleaned


def write_notebook(path: Path, notebook: "NotebookNode") -> None:
    """Writes a notebook, atomically."""
    import nbformat

    with atomic_write(path, "w") as file:
        nbformat.write(notebook, file)


def after_save(os_path: str, **_: Any) -> subprocess.Popen:
    """Jupyter's hook after saving (`make lab`): adds a tracked notebook to git's index if it does not differ from that.

    The filter strips outputs, but git compares the sizes of files first, and would name the notebook as modified.
    """
    same = 'cd "${0%/*}" && git diff --exit-code -- "$0" && git add --update -- "$0"'
    return subprocess.Popen(["sh", "-c", same, os_path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":  # git's filter, see .gitattributes and the Makefile: a notebook as it is committed
    import sys

    import nbformat

    print(nbformat.writes(clean(nbformat.read(sys.stdin, as_version=4))))
