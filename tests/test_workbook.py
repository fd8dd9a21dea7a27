"""The headless run: what it executes, what it refuses, and what it says of a notebook that fails."""

import ast
import os
import re
import sys

import nbformat
import pypdf
import pytest
from notebook_projects import SVG, code, make_project, parameters, results

from lmcore.errors import UserError
from workbook import cli
from workbook.notebook import declared_parameters, execution_fault, read_notebook
from workbook.parameters import parse_overrides
from workbook.record import read_record
from workbook.report.verify import check_writeup
from workbook.run import refresh, run_workbook

GOOD = {
    "_01_first": [
        "# 01 First",
        parameters(),
        code("import os, sys\nprint(sys.executable)", "show_stdout"),
        code("(scale, data, out, steps, rates, os.environ['MPLBACKEND'])"),
        code(SVG),
    ],
    "_02_second": ["# 02 Second", parameters("scale = 'smoke'\ndata = ''\nout = ''"), code("2 + 2"), code("")],
}


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("good"), {"01_first": "rates: [2]"}, **GOOD)
    patch = pytest.MonkeyPatch()
    patch.setenv("MPLBACKEND", "Agg")
    patch.delenv("JUPYTER_PATH", raising=False)
    yield run_workbook(project=project, out=project / "made", parameters={"steps": 7})
    assert "JUPYTER_PATH" not in os.environ
    patch.undo()


def test_executes_all_notebooks_and_makes_the_writeup(good_run):
    assert {outcome.name: outcome.state for outcome in good_run.outcomes} == {"01_first": "done", "02_second": "done"}
    assert good_run.failure is None
    backend = "module://matplotlib_inline.backend_inline"
    made = good_run.out / "notebooks"
    (shown,) = results(made / "01_first.ipynb")
    assert ast.literal_eval(shown) == ("smoke", "embedded", str(good_run.out.resolve()), 7, [2], backend)
    assert results(made / "02_second.ipynb") == ["4"]
    printed = [
        o.text for cell in read_notebook(made / "01_first.ipynb").cells for o in cell.get("outputs", []) if "text" in o
    ]
    assert "".join(printed).strip() == sys.executable
    record = read_record(good_run.out)
    assert record["notebooks"][0]["parameters"]["steps"] == 7
    assert record["notebooks"][0]["environment"]["python"]
    found = check_writeup(good_run.out)
    assert (found["notebooks"], found["figures"]) == (2, 1)
    assert found["pages"] >= 1


def run(project, **options):
    return run_workbook(project=project, out=project / "made", **options)


def test_failure_stops_but_is_written_up(tmp_path):
    project = make_project(
        tmp_path,
        _01_first=["# 01 First", parameters(), code("'kept'")],
        _02_second=["# 02 Second", parameters(), "## The bad part", code("raise ValueError('no such luck')")],
        _03_third=["# 03 Third", parameters(), code("1")],
    )
    result = run(project)
    assert [outcome.state for outcome in result.outcomes] == ["done", "failed", "not run"]
    assert result.failure == (
        "Notebook 02_second failed at code cell 2 (under “The bad part”): ValueError: no such luck."
    )
    assert execution_fault(read_notebook(project / "made" / "notebooks" / "02_second.ipynb"))[0] == 2
    assert not (project / "made" / "notebooks" / "03_third.ipynb").exists()
    page = " ".join(page.extract_text() for page in pypdf.PdfReader(result.pdf).pages)
    for words in ("kept", "no such luck", "03_third was not run"):
        assert words in page
    with pytest.raises(UserError, match="02_second failed"):
        check_writeup(project / "made")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit(0)", "ended the notebook early"),
        ("import os; os._exit(0)", "died"),
    ],
)
def test_early_end_is_a_failure(tmp_path, source, words):
    project = make_project(tmp_path, _01_first=["# 01", parameters(), code(source), code("1"), code("2")])
    result = run(project)
    assert result.outcomes[0].state == "failed"
    assert re.search(words, result.failure), result.failure


BAD_INPUT = {
    "01_first has no parameter 'stepz'; its parameters are scale, data, out, steps": ("stepz: 3", {}),
    "'steps' of notebook 01_first must be of type int, not 'many'": ("steps: many", {}),
    "must be a mapping": ("3", {}),
    "is not YAML": ("{", {}),
    "No notebook has a parameter 'step'": ("", {"parameters": {"step": 3}}),
    "no scale 'huge'.*choose one of smoke": ("", {"scale": "huge"}),
    "no notebook '09'; there are 01_first": ("", {"notebooks": ["09"]}),
    "no file or folder nowhere/at/all": ("", {"data": "nowhere/at/all"}),
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_refused_before_anything_runs(tmp_path, words):
    text, options = BAD_INPUT[words]
    project = make_project(tmp_path, {"01_first": text}, _01_first=[parameters(), code("1")])
    with pytest.raises(UserError, match=words):
        run(project, **options)
    assert not (project / "made").exists()


def test_the_parameters_cell_holds_literals_alone():
    def declared(cell):
        return declared_parameters(nbformat.v4.new_notebook(cells=[cell]), "01_first")

    given = parameters("# a comment\nsteps = -3  # why\nname = 'x'\npair = (1, None)")
    assert declared(given) == {"steps": -3, "name": "x", "pair": (1, None)}
    with pytest.raises(UserError, match="must carry the tag 'parameters'"):
        declared(code("steps = 3"))
    for source, line in {
        "steps = 3\nrates = [0.1 * 2]": 2,
        "import os": 1,
        "a = b = 3": 1,
        "a = 1\nsteps =": 2,
    }.items():
        with pytest.raises(UserError, match=f"line {line} of the parameters cell must be `name = literal`"):
            declared(parameters(source))


def test_cells_must_have_run_in_order():
    def fault(*counts):
        cells = [code("1") for _ in counts]
        for cell, count in zip(cells, counts, strict=True):
            cell.execution_count = count
        return execution_fault(nbformat.v4.new_notebook(cells=cells))

    assert fault(1, 2, 3) is None
    assert fault(1, None, 2) == (2, "the cell was not run")
    assert fault(1, 3, 2) == (3, "the cell was run out of order")


def test_refresh_rewrites_only_kept_outputs(tmp_path, monkeypatch, capsys):
    kept = code("steps * 2", "keep_output", "nbval-check-output")
    project = make_project(tmp_path, _01_first=["# 01", parameters(), kept, code("steps * 3")])
    path = project / "notebooks" / "01_first.ipynb"
    monkeypatch.chdir(project)
    assert cli.main(["refresh"]) == 0
    assert f"{path}: rewritten" in capsys.readouterr().out
    assert results(path) == ["6"]
    kept = read_notebook(path).cells[2]
    assert kept.execution_count == 1  # nbval takes a cell with outputs and no count for a mistake
    assert read_notebook(path).cells[3].execution_count is None
    assert kept.metadata.tags == ["keep_output", "nbval-check-output"]
    assert refresh(project) == []
    before = path.read_bytes().replace(b"steps * 3", b"steps / 0")
    path.write_bytes(before)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        refresh(project)
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", ["run", "refresh", "handin", "status", "submit notebooks", "submit train --run r"])
def test_without_a_checkout_there_is_a_sentence(tmp_path, monkeypatch, capsys, words):
    """As from an installed wheel, in a folder that is in no project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbook.parameters.__file__", str(tmp_path / "workbook" / "parameters.py"))
    assert cli.main(words.split()) == 2
    said = "workbook: There is no notebooks/ folder here: run this in a checkout of the project.\n"
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]


def test_overrides_are_read_as_literals():
    given = ["a=3", "b=1e-3", "c=true", "d=[1, 2]", "e=text", "f=None"]
    assert parse_overrides(given) == {"a": 3, "b": 1e-3, "c": True, "d": [1, 2], "e": "text", "f": None}
    with pytest.raises(UserError, match="name=value"):
        parse_overrides(["steps"])
