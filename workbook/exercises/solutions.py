"""The solutions in the notebooks are the answers: `python -m workbook.exercises.solutions` copies them to a file.

The library, also in the edition for students, reads that file: a notebook holds what its reader writes.
"""

import re
from pathlib import Path

from lmcore.files import write_json
from workbook.notebook import CHECK, EXERCISE, code_cells, read_notebook, tags

CHECK_CALL = re.compile(r'(?:(?P<target>.+?) = )?check\("(?P<name>\w+)", (?P<solution>.+)\)')
"""The name that is bound to the verdict, the exercise, and what is checked."""

MARKER = re.compile(r"^ *### (BEGIN|END) SOLUTION *\n?", re.MULTILINE)
FILE = Path(__file__).with_name("solutions.json")


def solutions(notebooks: Path) -> dict[str, list[str]]:
    """By exercise: the source that solves it, and the Python that is checked, such as the function's name."""
    found, source = {}, ""
    for path in sorted(notebooks.glob("[0-9]*.ipynb")):
        for _, cell in code_cells(read_notebook(path)):
            if EXERCISE in tags(cell):
                source = MARKER.sub("", cell.source)
            elif CHECK in tags(cell) and (call := CHECK_CALL.search(cell.source)):
                found[call["name"]] = [source, call["solution"]]
    return found


if __name__ == "__main__":
    write_json(FILE, solutions(Path(__file__).parents[2] / "notebooks"))
