"""Notebook 08: its checked cells, and which notebooks have records."""

import contextlib
import io
import json
import os
import re
import subprocess

from notebook_cells import ANSWERS, PROJECT

from workbook.notebook import code_cells, read_notebook, tags

TRAINS = re.compile(
    r"-(train|plan|rates|table|norm|post|nope|positions|silu|additions|web-(?!data|corpora)|run|figure|answer)"
)
"""Cells that train, or need what was trained."""


def test_the_checked_cells_print_what_is_committed(tmp_path):
    """As nbval, without the cells that train."""
    variables, said = {"__name__": "__main__"}, {}
    cells = [cell for _, cell in code_cells(read_notebook(PROJECT / "notebooks" / "08_experiments.ipynb"))]
    here = os.getcwd()
    try:
        for cell in cells:
            if TRAINS.search(cell.id.removeprefix("experiments")):
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(cell.source, variables)
            if "parameters" in tags(cell):
                variables["out"] = str(tmp_path)
            if "nbval-check-output" in tags(cell):
                said[cell.id] = printed.getvalue(), "".join(output["text"] for output in cell.outputs)
    finally:
        os.chdir(here)
    assert len(said) >= 4
    assert all(committed for _, committed in said.values())
    for name, (printed, committed) in said.items():
        assert printed == committed, name


def test_make_record_leaves_out_notebooks_without_records():
    said = subprocess.run(["make", "-n", "record"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    recorded = list(json.loads(ANSWERS.read_text(encoding="utf-8")))
    assert f"--notebooks {' '.join(recorded)}\n" in said
    every = sorted(path.stem for path in (PROJECT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    left_out = [name for name in every if name not in recorded]
    assert re.findall(r"echo '(\w+) has no records", said) == left_out
