"""Notebook 08: its answers at scale smoke, where web pages have records as well, and what it refuses."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
from unittest.mock import MagicMock

import matplotlib.pyplot as plt
import pytest
import seaborn as sns
from notebook_cells import ANSWERS, PROJECT, answer_calls, run_cells, typed_numbers

import workbook.report.notebook as notebook_tools
from lmcore.config import replace
from lmcore.data import prepare
from lmcore.errors import UserError
from lmcore.recipes import RECIPES
from lmcore.train import train
from workbook.notebook import code_cells, read_notebook, tags

NAME = "08_experiments"
PROBLEMS = {"layer_norm_ablation", "pre_norm_ablation", "no_pos_emb", "swiglu_ablation", "main_experiment"}
PROBLEMS |= {"leaderboard (A1)"}
TRAINS = re.compile(
    r"-(train|plan|rates|table|norm|post|nope|positions|silu|additions|web-(?!data|corpora)|run|figure|answer)"
)
"""Cells that train, or need what was trained."""


def without_figures(patch: pytest.MonkeyPatch) -> None:
    """Figures take longer than everything else but the training; here they are not drawn."""
    drawing = {sns: ["relplot", "move_legend"], plt: ["close"], notebook_tools: ["save_figure", "Picture"]}
    for module, names in drawing.items():
        for name in names:
            patch.setattr(module, name, MagicMock())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder of the notebook's tables, and its answers."""
    out = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as patch:
        without_figures(patch)
        answers = run_cells(NAME, out=str(out), workers=1)
    return out / "results", answers


def test_every_problem_has_an_answer_with_claims(smoke):
    _, answers = smoke
    assert answers.keys() >= PROBLEMS
    assert all(found["claims"] for found in answers.values())


def test_the_tables_give_the_same_answers_again(smoke, tmp_path, monkeypatch):
    records, answers = smoke
    without_figures(monkeypatch)
    again = run_cells(NAME, out=str(tmp_path), records=str(records))
    assert again == answers
    assert not (tmp_path / "runs").exists()  # nothing was trained


def test_templates_hold_no_numbers():
    for call in answer_calls(NAME):
        template = ast.literal_eval(call.args[1])
        assert typed_numbers(template) == [], template


def test_the_checked_cells_print_what_is_committed(tmp_path):
    """As nbval, without the cells that train."""
    variables, said = {"__name__": "__main__"}, {}
    cells = [cell for _, cell in code_cells(read_notebook(PROJECT / "notebooks" / f"{NAME}.ipynb"))]
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


@pytest.mark.parametrize("split", ["valid", "dev"])
def test_a_corpus_too_short_is_one_sentence(tmp_path, split):
    (tmp_path / "web.txt").write_text("A page.<|endoftext|>\n" * 20, encoding="utf-8")
    short = prepare(tmp_path / "web.txt", "bpe:260", tmp_path / "data", progress=False)
    config = replace(RECIPES["smoke"], data=str(short.folder), evaluate_on=split)
    with pytest.raises(UserError, match=r"has only \d+; use a longer") as caught:
        train(config, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_make_record_leaves_out_notebooks_without_records():
    said = subprocess.run(["make", "-n", "record"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    recorded = list(json.loads(ANSWERS.read_text(encoding="utf-8")))
    assert f"--notebooks {' '.join(recorded)}\n" in said
    every = sorted(path.stem for path in (PROJECT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    left_out = [name for name in every if name not in recorded]
    assert re.findall(r"echo '(\w+) has no records", said) == left_out
