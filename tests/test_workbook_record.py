"""The records of notebooks: what is kept, what is executed again, and what another process holds."""

import json
import shutil

import pytest
from filelock import FileLock
from notebook_projects import code, make_project, parameters

from lmcore.errors import EXIT_FAILURE, UserError
from workbook.notebook import read_notebook, write_notebook
from workbook.record import (
    NotebookRecord,
    read_record,
    read_records,
    record_file,
    remove_others,
    source_hash,
    unfinished,
    write_record,
)
from workbook.run import run as run_workbook

NAMES = ["01_first", "02_second", "03_third"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of notebooks that leave a mark each time they are executed, for which no kernel is started."""

    def execute(path, record, out, *_):
        with open(out / record.name, "a") as file:
            file.write("x")
        shutil.copy(path, out / "notebooks")
        record.state = "failed" if "1 / 0" in path.read_text() else "done"
        write_record(out, record)

    monkeypatch.setattr("workbook.run.execute", execute)
    cells = {f"_{name}": [f"# {name}", parameters(), code(f"'{name}'")] for name in NAMES}
    monkeypatch.chdir(make_project(tmp_path, **cells))
    return tmp_path


def run(project, **options):
    return run_workbook(out=project / "made", writeup=False, **options)


def executions(project) -> list[int]:
    """How often each notebook was executed."""
    files = [project / "made" / name for name in NAMES]
    return [len(file.read_text()) if file.exists() else 0 for file in files]


def change(project, name: str, source: str | None = None, tags: tuple[str, ...] = ()) -> None:
    """Gives the last cell of a notebook other tags, and another source if there is one."""
    path = project / "notebooks" / f"{name}.ipynb"
    notebook = read_notebook(path)
    notebook.cells[-1].source = source or notebook.cells[-1].source
    notebook.cells[-1].metadata["tags"] = list(tags)
    write_notebook(path, notebook)


def test_done_notebooks_are_kept_unless_something_changed(project):
    assert run(project) == 0
    assert not (project / "made" / "writeup").exists()
    change(project, "02_second", "2")
    (project / "made" / "notebooks" / "03_third.ipynb").unlink()
    assert run(project, resume=True) == 0
    assert executions(project) == [1, 2, 2]
    run(project, resume=True, notebooks=["02"], parameters=["rates=[2.0]"])
    assert executions(project) == [1, 3, 2]


def test_a_run_anew_forgets_what_it_did_not_reach(project):
    run(project, notebooks=["01", "02"])
    before = read_records(project / "made")
    run(project, notebooks=["02"])
    assert executions(project) == [1, 2, 0]
    assert read_records(project / "made")[0] == before[0]
    change(project, "01_first", "1 / 0")
    assert run(project) == EXIT_FAILURE
    assert [record.state for record in read_records(project / "made")] == ["failed", "not run", "not run"]


def test_other_data_replace_the_records(project):
    run(project, notebooks=["01"], parameters=["steps=7"])
    record = read_record(project / "made", "01_first")
    assert (record.scale, record.data, record.parameters["steps"]) == ("smoke", "embedded", 7)
    remove_others(project / "made", "smoke", "embedded")
    assert read_record(project / "made", "01_first") == record
    remove_others(project / "made", "smoke", "text.txt")
    assert read_record(project / "made", "01_first") is None


def test_running_is_what_is_held(project):
    run(project, notebooks=["01"])
    file = record_file(project / "made", "01_first")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "running"}))
    assert unfinished(read_records(project / "made")) == ["Notebook 01_first was stopped before its end."]
    with FileLock(project / "made" / "notebooks" / ".01_first.lock"):
        assert unfinished(read_records(project / "made")) == ["Notebook 01_first is still running."]
        with pytest.raises(UserError, match="Another process is running notebook 01_first"):
            run(project)
    run(project, notebooks=["01"], resume=True)
    assert executions(project) == [2, 0, 0]


def test_sources_differ_in_cells_and_tags_but_not_in_outputs(project):
    path = project / "notebooks" / "01_first.ipynb"
    first, notebook = source_hash(path), read_notebook(path)
    notebook.cells[1].execution_count = 3
    notebook.cells[1].metadata["papermill"] = {}
    write_notebook(path, notebook)
    assert source_hash(path) == first
    change(project, "01_first", tags=("show_stdout",))
    assert source_hash(path) != first


def test_a_damaged_record_or_folder_is_one_sentence(project):
    made = project / "made"
    write_record(made, NotebookRecord("01_first"))
    for text in ("[]", "{", '{"name": 1, "x": 2}'):
        record_file(made, "01_first").write_text(text)
        with pytest.raises(UserError, match=r"01_first\.json"):
            read_records(made)
    (project / "file").write_text("a file")
    with pytest.raises(UserError, match="file"):
        run_workbook(out=project / "file", writeup=False)
