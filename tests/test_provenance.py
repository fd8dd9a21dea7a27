"""What a result says about where it comes from."""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from notebook_projects import code, make_project, parameters

from lmcore import provenance
from workbook.notebook import read_notebook
from workbook.run import run_workbook

PROJECT = Path(__file__).parents[1]


def git(folder, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with a package that holds provenance.py, which then believes to live there."""
    (tmp_path / "house" / "lmcore").mkdir(parents=True)
    source = tmp_path / "house" / "lmcore" / "provenance.py"
    source.write_text("")
    git(tmp_path / "house", "init", "-q")
    commit(tmp_path / "house")
    monkeypatch.setattr(provenance, "__file__", str(source))
    monkeypatch.delenv("LMCORE_GIT_COMMIT", raising=False)
    return tmp_path / "house"


def commit(folder) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "a message")
    return git(folder, "rev-parse", "HEAD")


def test_git_state_gives_the_commit_and_whether_it_holds_changes(house, monkeypatch):
    monkeypatch.setenv("LMCORE_GIT_COMMIT", "abc123")
    expected = {"git_commit": git(house, "rev-parse", "HEAD"), "git_dirty": False}
    assert provenance.git_state() == expected
    (house / "untracked.txt").write_text("a run's output")
    assert provenance.git_state() == expected
    (house / "lmcore" / "provenance.py").write_text("changed = True")
    assert provenance.git_state() == expected | {"git_dirty": True}
    monkeypatch.setattr(provenance.shutil, "which", lambda _: None)  # without git the variable has it
    assert provenance.git_state() == {"git_commit": "abc123", "git_dirty": None}


def test_git_state_of_an_installation_inside_someone_elses_checkout(house, monkeypatch):
    installed = house / ".venv" / "lmcore" / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(installed))
    installed.parent.mkdir(parents=True)
    assert provenance.git_state() == {"git_commit": None, "git_dirty": None}
    monkeypatch.setenv("LMCORE_GIT_COMMIT", "abc123")
    assert provenance.git_state() == {"git_commit": "abc123", "git_dirty": None}


def test_an_archive_carries_its_commit(house, tmp_path, monkeypatch):
    """`git archive` of this very project's files, before which the variable does not count."""
    for name in (".gitattributes", "lmcore/commit.txt"):
        shutil.copy(PROJECT / name, house / name)
    number = commit(house)
    git(house, "archive", "-o", tmp_path / "house.tar", "HEAD")
    shutil.unpack_archive(tmp_path / "house.tar", tmp_path / "copy")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "copy" / "lmcore" / "provenance.py"))
    monkeypatch.setenv("LMCORE_GIT_COMMIT", "abc123")
    assert provenance.git_state() == {"git_commit": number, "git_dirty": None}


def test_environment_holds_everything_and_is_json():
    environment = provenance.environment()
    wanted = "time_utc command python torch device driver platform cores packages git_commit git_dirty"
    assert set(wanted.split()) <= set(environment)
    assert environment["torch"] == torch.__version__
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert json.loads(json.dumps(environment)) == environment
    written = datetime.datetime.fromisoformat(provenance.utc_now())
    assert written.utcoffset() == datetime.timedelta(0)
    assert abs(datetime.datetime.now(datetime.UTC) - written) < datetime.timedelta(minutes=1)


@pytest.mark.skipif(not torch.__version__.endswith("+cpu"), reason="this build may find a GPU: it is asked")
def test_a_build_for_cpus_alone_says_the_same_without_being_imported():
    ask = "import json, sys; from lmcore.provenance import torch_build; found = json.dumps(torch_build())"
    words = [sys.executable, "-c", f"{ask}; assert 'torch' not in sys.modules; print(found)"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == provenance.torch_build()


def test_command_line_is_whole_and_names_no_machine(monkeypatch):
    folder = os.path.abspath("runs/x")
    words = ["benchmarks/cpu.py", "--prompt", "two words", f"--out={folder}", "--data", "/home/text"]
    for argv, expected in (
        (["/somewhere/private/lmcore", "train", "--steps", "5"], "lmcore train --steps 5"),
        (["/site/lmcore/__main__.py", "sweep", folder], "workbook sweep runs/x"),
        (words, "benchmarks/cpu.py --prompt 'two words' --out=runs/x --data .../text"),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert provenance.command_line() == expected


def in_a_kernel(monkeypatch, parent: list[str], **variables: str) -> str:
    """The command that is recorded in a kernel whose parent was started with these words."""
    monkeypatch.setattr(sys, "argv", ["/venv/ipykernel_launcher.py", "-f", "/tmp/tmpabc.json"])
    monkeypatch.delenv(provenance.COMMAND, raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = types.SimpleNamespace(parent=lambda: types.SimpleNamespace(cmdline=lambda: parent))
    monkeypatch.setattr(provenance.psutil, "Process", lambda: process)
    return provenance.command_line()


def test_the_command_in_a_kernel(monkeypatch):
    papermill = ["04_benchmark.ipynb", "/tmp/x.ipynb", "-p", "scale", "gpu"]
    wanted = "papermill 04_benchmark.ipynb .../x.ipynb -p scale gpu"
    assert in_a_kernel(monkeypatch, ["/venv/bin/python3.11", "/venv/bin/papermill", *papermill]) == wanted
    assert in_a_kernel(monkeypatch, ["python", "-m", "papermill", *papermill]) == wanted
    lab, session = ["/venv/bin/python", "/venv/bin/jupyter-lab"], {"JPY_SESSION_NAME": "/home/me/04_benchmark.ipynb"}
    assert in_a_kernel(monkeypatch, lab, **session) == "notebook 04_benchmark"
    assert in_a_kernel(monkeypatch, lab) == "a notebook"
    assert in_a_kernel(monkeypatch, lab, LMCORE_COMMAND="workbook run") == "workbook run"


def test_a_notebook_of_the_workbook_knows_command_and_parameters(tmp_path, monkeypatch):
    said = code("from lmcore.provenance import command_line\nprint(command_line())")
    project = make_project(tmp_path, _01_good=["# 01", parameters(), said])
    monkeypatch.setattr(sys, "argv", ["/venv/bin/lmcore", "workbook", "--scale", "smoke"])
    run_workbook(project=project, parameters={"steps": 4}, writeup=False)
    printed = read_notebook(project / "runs" / "smoke" / "notebooks" / "01_good.ipynb").cells[-1].outputs[0].text
    assert printed.startswith("workbook run --scale smoke (notebook 01_good: ")
    assert "steps=4" in printed
    assert 'data="embedded"' in printed
    assert str(tmp_path) not in printed
    assert provenance.COMMAND not in os.environ


def values(record, path=()):
    """All texts of a JSON value, with the keys that lead to them."""
    if isinstance(record, dict | list):
        for key, item in record.items() if isinstance(record, dict) else enumerate(record):
            yield from values(item, (*path, key))
    elif isinstance(record, str):
        yield path, record


FOREIGN = re.compile(
    r"ipykernel_launcher|\.json -f|-f \S*\.json|\btmp[a-z0-9_]{8}\b"
    r"|(?<![\w.])/(?:tmp|home|root|work|mnt|scratch|Users)\b"
)
"""What says nothing to others: a kernel's arguments, temporary files, folders of one machine."""


def test_what_a_record_must_not_say_is_recognized():
    assert FOREIGN.search("ipykernel_launcher.py -f ../../tmp2zzv2vec.json")
    assert FOREIGN.search("lmcore train --run /home/me/r")


RECORDS = sorted(path for folder in ("results", "writeup") for path in (PROJECT / folder).rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=[str(path.relative_to(PROJECT)) for path in RECORDS])
def test_committed_records_say_where_they_come_from(path):
    found = [(keys, text) for keys, text in values(json.loads(path.read_text(encoding="utf-8"))) if keys]
    for keys, text in found:
        assert not FOREIGN.search(text), f"{path.name}: {keys}: {text}"
        if keys[-1] in ("command", "host", "hostname", "cwd"):
            assert keys[-1] == "command", f"{path.name}: {keys}"
            paths = [word.rpartition("=")[2] for word in text.split()]
            assert not any(os.path.isabs(path) and path.strip("/") for path in paths)  # // divides
        if keys[-1] == "git_commit":
            assert re.fullmatch("[0-9a-f]{40}", text)


def test_driver_is_asked_of_nvidia_smi(monkeypatch):
    monkeypatch.setattr(provenance.shutil, "which", lambda name: f"/usr/bin/{name}")
    for stdout, status, expected in (("570.86.15\n570.86.15\n", 0, "570.86.15"), ("no devices were found\n", 6, None)):
        done = subprocess.CompletedProcess([], status, stdout=stdout, stderr="")
        monkeypatch.setattr(provenance.subprocess, "run", lambda *_, done=done, **__: done)
        assert provenance.gpu_driver() == expected
