"""The records of notebooks: kept apart, gone on from, merged, and read from folders of the older version."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from filelock import FileLock
from notebook_projects import code, make_project, parameters

from lmcore.errors import UserError
from lmcore.workbook.notebook import read_notebook, write_notebook
from lmcore.workbook.record import (
    read_notebook_record,
    read_record,
    record_file,
    sentence,
    source_hash,
    unfinished,
    update_plan,
)
from lmcore.workbook.run import run_workbook

COUNT = "open(f'{out}/' + NAME, 'a').write('x')"
NAMES = ["01_first", "02_second", "03_third"]


def counting(name: str) -> list:
    """Cells that leave a mark each time they are executed."""
    return [f"# {name}", parameters(), code(f"NAME = {name!r}\n{COUNT}")]


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path, **{f"_{name}": counting(name) for name in NAMES})


def run(project, **options):
    return run_workbook(project=project, out=project / "made", **({"writeup": False} | options))


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A project whose notebooks have all been executed, and a copy of it: records hold its path."""
    folder = tmp_path_factory.mktemp("executed")
    project = make_project(folder / "project", **{f"_{name}": counting(name) for name in NAMES})
    run(project)
    return project, shutil.copytree(project, folder / "kept")


@pytest.fixture
def done(executed):
    """That project as it was."""
    project, kept = executed
    shutil.rmtree(project)
    return shutil.copytree(kept, project)


def executions(project) -> list[int]:
    """How often each notebook was executed."""
    files = [project / "made" / name for name in NAMES]
    return [len(file.read_text()) if file.exists() else 0 for file in files]


def states(project) -> list[str]:
    return [entry["state"] for entry in read_record(project / "made")["notebooks"]]


def change(project, name: str, source: str | None = None, tags: tuple[str, ...] = ()) -> None:
    """Gives the last cell of a notebook other tags, and another source if there is one."""
    path = project / "notebooks" / f"{name}.ipynb"
    notebook = read_notebook(path)
    notebook.cells[-1].source = source or notebook.cells[-1].source
    notebook.cells[-1].metadata["tags"] = list(tags)
    write_notebook(path, notebook)


def test_done_notebooks_are_kept_unless_something_changed(project):
    result = run(project)
    assert (result.html, result.pdf, result.stopped, result.failure) == (None, None, None, None)
    assert not (project / "made" / "writeup").exists()
    assert executions(project) == [1, 1, 1]
    assert [outcome.state for outcome in run(project, resume=True).outcomes] == ["done"] * 3
    assert executions(project) == [1, 1, 1]
    change(project, "02_second", f"NAME = '02_second'; {COUNT}")
    run(project, resume=True)
    assert executions(project) == [1, 2, 1]
    change(project, "03_third", tags=("hide",))
    run(project, resume=True)
    assert executions(project) == [1, 2, 2]
    run(project, resume=True, parameters={"rates": [2.0]})
    assert executions(project) == [2, 3, 3]
    (project / "made" / "notebooks" / "03_third.ipynb").unlink()
    run(project, resume=True, parameters={"rates": [2.0]})
    assert executions(project) == [2, 3, 4]
    run(project)
    assert executions(project) == [3, 4, 5]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read as a notebook"),
        (lambda text: "", "cannot be read as a notebook"),
        (lambda text: '{"cells": 3}', "cannot be read as a notebook"),
        (lambda text: '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "has other cells"),
        (lambda text: re.sub('"execution_count": [0-9]+', '"execution_count": null', text), "the cell was not run"),
    ],
    ids=["truncated", "empty", "no notebook", "without cells", "not run"],
)
def test_a_damaged_executed_notebook_is_run_again(done, capsys, damage, words):
    file = done / "made" / "notebooks" / "01_first.ipynb"
    file.write_text(damage(file.read_text()))
    run(done, notebooks=["01", "02"], resume=True)
    assert states(done) == ["done"] * 3
    assert executions(done) == [2, 1, 1]
    said = capsys.readouterr().out
    assert re.search(f"01_first: was done, but is run again: .*{words}", said)
    assert "02_second: kept, done before" in said


def test_one_notebook_run_again_leaves_the_others_alone(done):
    before = read_record(done / "made")["notebooks"]
    result = run(done, notebooks=["02"], writeup=True)
    assert [outcome.name for outcome in result.outcomes] == ["02_second"]
    after = read_record(done / "made")["notebooks"]
    assert [entry["name"] for entry in after] == NAMES
    assert after[::2] == before[::2]
    page = result.html.read_text()
    assert all(f'id="{name}"' in page for name in NAMES)
    assert executions(done) == [1, 2, 1]


def test_a_run_anew_forgets_what_it_did_not_reach(done):
    change(done, "01_first", "1 / 0")
    assert run(done).failure.startswith("Notebook 01_first failed at code cell 2")
    assert states(done) == ["failed", "not run", "not run"]
    assert unfinished(read_record(done / "made"))[1:] == [
        "Notebook 02_second was not run.",
        "Notebook 03_third was not run.",
    ]


def test_other_data_replace_the_plan(done, tmp_path):
    (tmp_path / "text.txt").write_text("text")
    run(done, notebooks=["03"], data=str(tmp_path / "text.txt"))
    record = read_record(done / "made")
    assert record["data"] == str(tmp_path / "text.txt")
    assert [(entry["name"], entry["state"]) for entry in record["notebooks"]] == [("03_third", "done")]
    update_plan(done / "made", "smoke", str(tmp_path / "text.txt"), ["01_first"], NAMES)
    assert states(done) == ["not run", "done"]  # 01_first was executed, but with the embedded corpus


def test_running_notebooks_are_not_disturbed(project, tmp_path):
    run(project, notebooks=["01", "02"])
    (tmp_path / "text.txt").write_text("text")
    with FileLock(project / "made" / "notebooks" / ".02_second.lock"):
        with pytest.raises(UserError, match=r"notebook 02_second in .* with scale smoke and data embedded"):
            run(project, notebooks=["01"], data=str(tmp_path / "text.txt"))
        with pytest.raises(UserError, match="Another process is running notebook 02_second"):
            run(project)
        run(project, notebooks=["01"])
    assert executions(project) == [2, 1, 0]
    assert states(project) == ["done", "done"]


def test_running_is_what_is_held(project):
    run(project, notebooks=["01"])
    file = record_file(project / "made", "01_first")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "running"}))
    assert unfinished(read_record(project / "made")) == ["Notebook 01_first was stopped before its end."]
    with FileLock(project / "made" / "notebooks" / ".01_first.lock"):
        assert unfinished(read_record(project / "made")) == ["Notebook 01_first is still running."]
    run(project, notebooks=["01"], resume=True)
    assert executions(project) == [2, 0, 0]


def test_two_processes_in_one_folder_lose_nothing(tmp_path):
    """Each waits, while it runs, for the other to run, too."""
    wait = (
        "import os, time\nopen(f'{out}/' + NAME, 'w').close()\n"
        "while not os.path.exists(f'{out}/' + OTHER): time.sleep(0.01)"
    )
    names = ["01_first", "02_second"]
    pairs = zip(names, reversed(names), strict=True)
    cells = {f"_{name}": [parameters(), code(f"NAME, OTHER = {name!r}, {other!r}\n{wait}")] for name, other in pairs}
    project = make_project(tmp_path, **cells)
    command = [sys.executable, "-m", "lmcore", "workbook", "--no-writeup", "--out", str(project / "made")]
    both = [subprocess.Popen([*command, "--notebooks", name], cwd=project) for name in names]
    assert [process.wait(120) for process in both] == [0, 0]
    entries = read_record(project / "made")["notebooks"]
    assert [(entry["name"], entry["state"]) for entry in entries] == [(name, "done") for name in names]


@pytest.mark.parametrize("text", ["[]", "{}", '{"scale": "smoke", "data": "embedded", "notebooks": [3]}', "{"])
def test_a_damaged_plan_is_refused(project, text):
    (project / "made").mkdir()
    (project / "made" / "workbook.json").write_text(text)
    for reader in (lambda: run(project), lambda: read_record(project / "made")):
        with pytest.raises(UserError, match=r"workbook\.json"):
            reader()


def test_a_damaged_record_is_refused(project):
    update_plan(project / "made", "smoke", "embedded", ["01_first"], NAMES)
    record_file(project / "made", "01_first").parent.mkdir()
    record_file(project / "made", "01_first").write_text('{"name": "01_first", "state": "asleep"}')
    with pytest.raises(UserError, match=r"01_first\.json is damaged.*remove it"):
        read_record(project / "made")


def test_a_folder_of_the_older_version_goes_on(done):
    plan = read_record(done / "made")
    keys = ("name", "state", "seconds", "cell", "heading", "error")
    old = plan | {"notebooks": [{key: entry[key] for key in keys} for entry in plan["notebooks"]]}
    (done / "made" / "workbook.json").write_text(json.dumps(old))
    for name in NAMES:
        record_file(done / "made", name).unlink()
    there = read_record(done / "made")
    assert [entry["state"] for entry in there["notebooks"]] == ["done"] * 3
    assert there["environment"] == plan["environment"]
    run(done, notebooks=["02"], resume=True)  # the old record does not say which cells were run
    assert executions(done) == [1, 2, 1]
    assert states(done) == ["done"] * 3
    assert read_notebook_record(done / "made", "03_third").environment == plan["environment"]


def test_records_say_where_from(project, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    run(project, notebooks=["01"], parameters={"steps": 7})
    record = read_notebook_record(project / "made", "01_first")
    assert (record.scale, record.data, record.job, record.parameters["steps"]) == ("smoke", "embedded", "42", 7)
    assert record.source == source_hash(project / "notebooks" / "01_first.ipynb")
    assert record.environment["python"]


def test_sources_differ_in_cells_and_tags_but_not_in_outputs(project):
    path = project / "notebooks" / "01_first.ipynb"
    first, notebook = source_hash(path), read_notebook(path)
    notebook.cells[1].execution_count = 3
    notebook.cells[1].metadata["papermill"] = {}
    write_notebook(path, notebook)
    assert source_hash(path) == first
    change(project, "01_first", tags=("show_stdout",))
    assert source_hash(path) != first


def test_sentences():
    stopped = {"name": "02", "state": "stopped", "cell": 3, "heading": "Here", "error": "SIGUSR1"}
    assert sentence(stopped) == "Notebook 02 was stopped by SIGUSR1 at code cell 3 (under “Here”)."
    assert sentence({"name": "02", "state": "stopped"}) == "Notebook 02 was stopped before its end."
    assert sentence({"name": "02", "state": "failed", "error": "no"}) == "Notebook 02 failed: no."
    assert sentence({"name": "02", "state": "done"}) is None


def test_a_folder_that_cannot_be_written_is_refused(project):
    if os.geteuid() == 0:
        (project / "made").write_text("a file")
    else:
        (project / "made").mkdir(mode=0o500)
    with pytest.raises(UserError, match="made"):
        run(project)
