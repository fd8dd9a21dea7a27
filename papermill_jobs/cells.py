"""Executes some cells of a notebook by their ids: one table, where the whole notebook would take too long.

`python papermill_jobs/cells.py 09_distributed runs/gpu distributed-ranks distributed-naive ... --scale gpu`

The notebook's first cells come first: its parameters, with those of the scale, where it begins, and all imports. A word
that starts with = is a statement in place of a cell.
"""

import argparse
import ast
import os
import sys
from pathlib import Path

import matplotlib
from IPython.core.interactiveshell import InteractiveShell

from lmcore.errors import UserError
from workbook.notebook import code_cells, read_notebook
from workbook.parameters import find_notebooks, find_project, resolve_parameters


def beginning(cells: list) -> list[str]:
    """The sources of the cells up to the one with `start`, and the imports of all that follow."""
    last = next(number for number, cell in enumerate(cells) if "start(" in cell.source)
    later = [statement for cell in cells[last + 1 :] for statement in ast.parse(cell.source).body]
    imports = [ast.unparse(each) for each in later if isinstance(each, ast.Import | ast.ImportFrom)]
    return [cell.source for cell in cells[: last + 1]] + ["\n".join(imports)]


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook")
    parser.add_argument("out", type=Path)
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--scale", default="gpu")
    given = parser.parse_intermixed_args()
    project = find_project()
    try:
        file = find_notebooks(project, [given.notebook])[0]
        found = resolve_parameters(project, [file], given.scale, {}, {"out": str(given.out.resolve())})
    except UserError as error:
        return str(error)
    cells = [cell for _, cell in code_cells(read_notebook(file))]
    sources = {cell.id: cell.source for cell in cells}
    unknown = [name for name in given.cells if not name.startswith("=") and name not in sources]
    if unknown:
        return f"{file.stem} has no cell {unknown[0]!r}; it has {', '.join(sources)}."
    chosen = "\n".join(f"{name} = {value!r}" for name, value in found[file.stem].items())
    first = beginning(cells)
    os.chdir(project / "notebooks")
    matplotlib.use("agg")
    shell = InteractiveShell.instance()
    named = [name[1:] if name.startswith("=") else sources[name] for name in given.cells]
    for source in (first[0], chosen, *first[1:], *named):
        if not shell.run_cell(source).success:
            return f"This cell failed: {source.strip().splitlines()[0]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
