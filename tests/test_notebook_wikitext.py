"""Notebook 10: when settings differ by more than the seeds of one."""

import ast
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from notebook_cells import PROJECT

from workbook.notebook import code_cells, read_notebook


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"a": [5.0, 5.1], "b": [4.0, 4.1], "c": [3.0, 3.0]}, "they differ by more than their seeds do"),
        ({"a": [5.0, 5.1], "b": [5.0, 5.2], "c": [3.0, 3.0]}, "A and B differ by less than their seeds do, the others"),
        (
            {"a": [5.0, 5.3], "b": [5.1, 5.1], "c": [5.0, 5.1]},
            "they differ by less than the seeds of one do, so no order",
        ),
        ({"a": [5.0], "b": [4.0], "c": [3.0]}, "with one seed, no difference is a finding"),
    ],
)
def test_settings_are_compared_with_their_seeds(losses, said):
    cells = {cell.id: cell for _, cell in code_cells(read_notebook(PROJECT / "notebooks" / "10_wikitext.ipynb"))}
    tree = ast.parse(cells["wikitext-answer-sizes"].source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    variables = {"np": np, "combinations": combinations}
    exec(compile(tree, "wikitext-answer-sizes", "exec"), variables)
    scores = pd.DataFrame(
        [(name, loss) for name, seeds in losses.items() for loss in seeds], columns=["setting", "loss"]
    )
    assert variables["undecided"](scores, {name: name.upper() for name in losses}).startswith(said)
