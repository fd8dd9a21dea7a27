"""The hand-in: what goes into code.zip, what never does, and when it is refused."""

import contextlib
import io
import os
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_projects import code, make_project, parameters

from lmcore.errors import EXIT_USER_ERROR, UserError
from workbook import cli
from workbook.handin import MAX_FILE_BYTES, handin, project_files
from workbook.notebook import CLEAN_METADATA, write_notebook
from workbook.record import NotebookRecord, write_record
from workbook.report.answers import answer
from workbook.report.writeup import write_writeup
from workbook.seal import seal

ROOT = Path(__file__).parents[1]

FILES = [".gitignore", "lmcore/tokenizer.py", "notebooks/01_good.ipynb", "run.sh"]
FILES += ["papermill_jobs/parameters/smoke/01_good.yaml"]
"""Of the project below."""


def write(folder: Path, *names: str, text: str = "secret") -> None:
    """Writes the text into files of a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def project(tmp_path):
    """A checkout of a small project with an executed workbook, a writeup and a learning curve in runs/smoke."""
    folder = make_project(tmp_path / "project", _01_good=["# 01 Good", parameters(), code("1")])
    shutil.copy(ROOT / ".gitignore", folder)
    out = folder / "runs" / "smoke"
    write(folder, "lmcore/tokenizer.py", "run.sh", text="SIZE = 1\n")
    (folder / "run.sh").chmod(0o755)
    os.utime(folder / "run.sh", (0, 0))  # a zip has no time before 1980
    write(out, "figures/recipe_curves.svg", text="<svg/>")
    write(out, "results/losses.json", text="{}")
    given = answer("decoding", "It decodes.")
    shown = new_output("display_data", {"text/markdown": given.data}, metadata=given.metadata)
    executed = new_notebook(cells=[new_code_cell("1", outputs=[shown], execution_count=1)], metadata=CLEAN_METADATA)
    write_notebook(out / "notebooks" / "01_good.ipynb", executed)
    ended(out, "done")
    seal(out, "01_good")
    write_writeup(out)
    git(folder, "init")
    return folder


def ended(out, state):
    """Gives the notebook a record of this state."""
    write_record(out, NotebookRecord("01_good", state, scale="smoke", data="embedded", cell=2, error="it broke"))


def submit(project, handout="cse599o-a1-part2", **options):
    """Makes the hand-in of the project; returns what is printed."""
    with contextlib.chdir(project), contextlib.redirect_stdout(io.StringIO()) as said:
        assert handin(project / "runs" / "smoke", project / "handin", handout, **options) == 0
    return said.getvalue()


def git(project, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", project, *identity, *arguments], check=True, capture_output=True)


def handed_in(project) -> set[str]:
    return {path.name for path in (project / "handin").iterdir()}


def test_the_hand_in_is_code_answers_results_and_learning_curve(project):
    lines = submit(project).splitlines()
    names = ["code.zip", "results.zip", "answers.pdf"]
    assert [Path(line.partition(":")[0]).name for line in lines] == names
    assert handed_in(project) == set(names)
    made = project / "runs" / "smoke" / "writeup" / "cse599o-a1-part2.pdf"
    assert (project / "handin" / "answers.pdf").read_bytes() == made.read_bytes()
    with zipfile.ZipFile(project / "handin" / "results.zip") as archive:
        of_results = ["notebooks/01_good.ipynb", "notebooks/01_good.json", "results/losses.json"]
        assert archive.namelist() == [*(f"results/{name}" for name in of_results), "manifest.json"]
    with zipfile.ZipFile(project / "handin" / "code.zip") as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == [f"code/{name}" for name in sorted([*FILES, "learning_curve.svg"])]
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    assert (modes["code/run.sh"], modes["code/lmcore/tokenizer.py"]) == (0o755, 0o644)
    submit(project, "cs336-a1")
    assert handed_in(project) == {"code.zip", "results.zip", "writeup.pdf"}


def test_what_is_made_or_secret_stays_out(project):
    secrets = [".env.local", "keys/id_rsa", "server.pem", ".netrc", "credentials.json"]
    ignored = ["model.pt", "data/stories/train.txt", ".venv/lib/x.py", "lmcore/__pycache__/x.pyc", ".pytest_cache/x"]
    write(project, *secrets, *ignored, "slurm-12.out", "a/.ipynb_checkpoints/a.ipynb", "lmcore.egg-info/PKG-INFO")
    write(project, "large.txt", text="a" * (MAX_FILE_BYTES + 1))
    (project / "link").symlink_to("/etc/hostname")
    (project / "deleted.py").touch()
    git(project, "add", "lmcore/tokenizer.py", "notebooks", "deleted.py")
    git(project, "commit", "-m", "x")
    (project / "deleted.py").unlink()
    write(project, "lmcore/hf_token.py", "next_token.csv", text="")
    files, left_out = project_files(project, made=[project / "runs" / "smoke"])
    assert {path.as_posix() for path in files} == {*FILES, "lmcore/hf_token.py", "next_token.csv"}
    assert [path.as_posix() for path in left_out] == ["large.txt", "link"]
    shutil.rmtree(project / ".git")
    with pytest.raises(UserError, match="git, which says what belongs to the project, cannot list"):
        project_files(project)


def test_a_writeup_that_reports_a_failure_is_refused(project):
    ended(project / "runs" / "smoke", "failed")
    with pytest.raises(UserError, match=r"Notebook 01_good .*failed at code cell 2: it broke.*--incomplete"):
        submit(project)
    assert not (project / "handin").exists()
    assert "Note: Notebook 01_good failed at code cell 2" in submit(project, incomplete=True)


def test_what_does_not_fit_together_is_refused(project):
    """By content: a clock that is wrong refuses nothing."""
    out = project / "runs" / "smoke"
    for file in out.rglob("*.*"):
        os.utime(file, (time.time() + 1e6,) * 2)
    submit(project)
    (out / "results" / "losses.json").write_text('{"loss": 1}')
    with pytest.raises(UserError, match=r"losses.json is not what notebook 01_good made.*--incomplete"):
        submit(project)
    (out / "results" / "losses.json").write_text("{}")
    with pytest.raises(UserError, match="Nothing of cs336-a2-2025 is answered"):
        submit(project, "cs336-a2-2025")
    (out / "writeup" / "cse599o-a1-part2.pdf").unlink()
    with pytest.raises(UserError, match=r"There is no \S+cse599o-a1-part2.pdf: run `workbook writeup"):
        submit(project)
    submit(project, incomplete=True)
    assert handed_in(project) == {"code.zip", "results.zip"}  # answers.pdf was that of the first hand-in


def test_the_command_takes_a_folder(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert cli.main(["handin", "runs/smoke", "--handout", "cs336-a1"]) == 0
    assert "writeup.pdf" in capsys.readouterr().out
    assert cli.main(["handin", "runs/gpu"]) == EXIT_USER_ERROR
    assert "There is no workbook in runs/gpu" in capsys.readouterr().err


def test_this_project_unpacks_to_one_that_works(project, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    handin(project / "runs" / "smoke", tmp_path, "cs336-a1")
    archive, data = zipfile.ZipFile(tmp_path / "code.zip"), (ROOT / "tests" / "data").iterdir()
    names = ["pyproject.toml", "constraints.txt", "Makefile", "notebooks/01_build.ipynb"]
    for name in [*names, *(path.relative_to(ROOT).as_posix() for path in data)]:
        assert archive.read(f"code/{name}") == (ROOT / name).read_bytes()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lmcore").rglob("*.py")}
    assert modules <= {name.removeprefix("code/") for name in archive.namelist()}
