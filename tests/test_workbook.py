"""The headless run: what it executes, what it refuses, and what it says of a notebook that fails."""

import ast
import sys

import nbformat
import pypdf
import pytest
from notebook_projects import SVG, answered, code, make_project, parameters, results

from lmcore.errors import EXIT_FAILURE, UserError
from workbook import cli
from workbook.notebook import declared_parameters, execution_fault, read_notebook
from workbook.parameters import parse_overrides
from workbook.record import read_records
from workbook.report.verify import writeup_faults
from workbook.run import run as run_workbook


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes a project of notebooks and runs them into tmp_path/made."""

    def run(scale: dict[str, str] | None = None, options: dict | None = None, **notebooks: list):
        monkeypatch.chdir(make_project(tmp_path, scale, **notebooks))
        run_workbook(out=tmp_path / "made", **(options or {}))

    return run


def test_executes_all_notebooks_and_makes_the_writeup(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    first = [
        "# 01 First", parameters(), code("import os, sys\nprint(sys.executable)", "show_stdout"),
        code("(scale, data, out, steps, rates, os.environ['MPLBACKEND'])"), code(SVG),
    ]  # fmt: skip
    second = ["# 02 Second", parameters("scale = 'smoke'\nout = ''"), code("2 + 2"), code("")]
    second.append(answered("linear", "A matrix."))
    monkeypatch.chdir(make_project(tmp_path, {"01_first": "rates: [2]"}, _01_first=first, _02_second=second))
    assert cli.main(["run", "--parameters", "steps=7"]) == 0
    out = tmp_path / "runs" / "smoke"
    assert f"PDF: {out / 'writeup' / 'cs336-a1.pdf'}" in capsys.readouterr().out
    backend = "module://matplotlib_inline.backend_inline"
    executed = out / "notebooks" / "01_first.ipynb"
    (shown,) = results(executed)
    assert ast.literal_eval(shown) == ("smoke", "embedded", str(out.resolve()), 7, [2], backend)
    assert results(executed.with_stem("02_second"))[0] == "4"
    printed = [out.text for cell in read_notebook(executed).cells for out in cell.get("outputs", []) if "text" in out]
    assert "".join(printed).strip() == sys.executable
    records = read_records(out)
    assert [record.state for record in records] == ["done", "done"]
    assert records[0].environment["python"]
    assert not writeup_faults(out)
    assert len([*(out / "writeup").glob("*.pdf")]) == 2


def test_failure_stops_but_is_written_up(tmp_path, monkeypatch, capsys):
    cells = {
        "_01_first": ["# 01 First", parameters(), answered("linear", "Kept.")],
        "_02_second": ["# 02 Second", parameters(), "## The bad part", code("raise ValueError('no such luck')")],
        "_03_third": ["# 03 Third", parameters(), code("1")],
    }
    monkeypatch.chdir(make_project(tmp_path, **cells))
    assert cli.main(["run"]) == EXIT_FAILURE
    said = "Notebook 02_second failed at code cell 2: ValueError: no such luck."
    assert said in capsys.readouterr().err
    out = tmp_path / "runs" / "smoke"
    assert [record.state for record in read_records(out)] == ["done", "failed", "not run"]
    assert execution_fault(read_notebook(out / "notebooks" / "02_second.ipynb"))[0] == 2
    assert not (out / "notebooks" / "03_third.ipynb").exists()
    page = " ".join(page.extract_text() for page in pypdf.PdfReader(out / "writeup" / "cs336-a1.pdf").pages)
    assert all(words in page for words in ("Kept.", "no such luck", "03_third was not run"))
    assert "02_second failed" in writeup_faults(out)[0]


EARLY = {"raise SystemExit(0)": "ended the notebook early", "import os; os._exit(0)": "died"}


@pytest.mark.parametrize("source", EARLY)
def test_early_end_is_a_failure(run, tmp_path, source):
    run(None, {"writeup": False}, _01_first=["# 01", parameters(), code(source), code("1")])
    (record,) = read_records(tmp_path / "made")
    assert record.state == "failed"
    assert EARLY[source] in record.error


BAD_INPUT = {
    "01_first has no parameter 'stepz'; its parameters are scale, data, out, steps": ("stepz: 3", {}),
    "'steps' of notebook 01_first must be of type int, not 'many'": ("steps: many", {}),
    "must be a mapping": ("3", {}),
    "No notebook has a parameter 'step'": ("", {"parameters": ("step=3",)}),
    "no scale 'huge'.*choose one of smoke": ("", {"scale": "huge"}),
    "no file or folder nowhere/at/all": ("", {"data": "nowhere/at/all"}),
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_refused_before_anything_runs(run, tmp_path, words):
    text, options = BAD_INPUT[words]
    with pytest.raises(UserError, match=words):
        run({"01_first": text}, options, _01_first=[parameters(), code("1")])
    assert not (tmp_path / "made").exists()


def test_the_parameters_cell_holds_literals_alone():
    def declared(cell):
        return declared_parameters(nbformat.v4.new_notebook(cells=[cell]), "01_first")

    given = parameters("# a comment\nsteps = -3  # why\nname = 'x'\npair = (1, None)")
    assert declared(given) == {"steps": -3, "name": "x", "pair": (1, None)}
    with pytest.raises(UserError, match="must carry the tag 'parameters'"):
        declared(code("steps = 3"))
    for source in ("# one\nrates = [0.1 * 2]", "\nimport os", "\na = b = 3", "a = 1\nsteps ="):
        with pytest.raises(UserError, match="line 2 of the parameters cell must be `name = literal`"):
            declared(parameters(source))


def test_every_cell_must_have_run():
    notebook = nbformat.v4.new_notebook(cells=[code("1"), code("2"), code(" ")])
    notebook.cells[0].execution_count = 1
    assert execution_fault(notebook) == (2, "the cell was not run")
    notebook.cells[1].execution_count = 2
    assert execution_fault(notebook) is None


@pytest.mark.parametrize("words", ["run", "handin made"])
def test_without_a_checkout_there_is_a_sentence(tmp_path, monkeypatch, capsys, words):
    """As from an installed wheel, in a folder that is in no project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbook.parameters.__file__", str(tmp_path / "workbook" / "parameters.py"))
    assert cli.main(words.split()) == 2
    said = "workbook: There is no notebooks/ folder here: run this in a checkout of the project.\n"
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]


def test_overrides_are_read_as_literals():
    given = ["a=3", "b=1e-3", "c=True", "d=[1, 2]", "e=a text", "f=None"]
    assert parse_overrides(given) == {"a": 3, "b": 1e-3, "c": True, "d": [1, 2], "e": "a text", "f": None}
    with pytest.raises(UserError, match="name=value"):
        parse_overrides(["steps"])
