"""What a result says about where it comes from."""

import datetime
import json
import os
import subprocess
import sys

import torch

from lmcore import provenance


def git(folder, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def checkout(folder, monkeypatch):
    """A repository at `folder` that holds a package with provenance.py, which then believes to live there."""
    (folder / "lmcore").mkdir(parents=True)
    source = folder / "lmcore" / "provenance.py"
    source.write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.setattr(provenance, "__file__", str(source))
    return source


def test_git_state_gives_the_commit_and_whether_it_holds_changes(tmp_path, monkeypatch):
    source = checkout(tmp_path / "house", monkeypatch)
    commit = git(tmp_path / "house", "rev-parse", "HEAD")
    assert provenance.git_state() == {"git_commit": commit, "git_dirty": False}
    (tmp_path / "house" / "untracked.txt").write_text("a run's output")
    assert provenance.git_state() == {"git_commit": commit, "git_dirty": False}
    source.write_text("changed = True")
    assert provenance.git_state() == {"git_commit": commit, "git_dirty": True}


def test_git_state_of_an_installation_inside_someone_elses_checkout(tmp_path, monkeypatch):
    checkout(tmp_path / "house", monkeypatch)
    installed = tmp_path / "house" / ".venv" / "lmcore" / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(installed))
    installed.parent.mkdir(parents=True)
    monkeypatch.delenv("LMCORE_GIT_COMMIT", raising=False)
    assert provenance.git_state() == {"git_commit": None, "git_dirty": None}
    monkeypatch.setenv("LMCORE_GIT_COMMIT", "abc123")
    assert provenance.git_state() == {"git_commit": "abc123", "git_dirty": None}


def test_git_state_without_git(monkeypatch):
    monkeypatch.setattr(provenance.shutil, "which", lambda _: None)
    monkeypatch.setenv("LMCORE_GIT_COMMIT", "abc123")
    assert provenance.git_state() == {"git_commit": "abc123", "git_dirty": None}


def test_environment_holds_everything_and_is_json():
    environment = provenance.environment()
    wanted = "time_utc command python torch device driver platform cores packages git_commit git_dirty"
    assert set(wanted.split()) <= set(environment)
    assert environment["torch"] == torch.__version__
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert json.loads(json.dumps(environment)) == environment


def test_time_is_utc():
    written = datetime.datetime.fromisoformat(provenance.utc_now())
    assert written.utcoffset() == datetime.timedelta(0)
    assert abs(datetime.datetime.now(datetime.UTC) - written) < datetime.timedelta(minutes=1)


def test_command_line_names_no_folder(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/private/lmcore", "train", "--steps", "5"])
    assert provenance.command_line() == "lmcore train --steps 5"
    monkeypatch.setattr("sys.argv", ["/site/lmcore/__main__.py", "sweep", os.path.abspath("runs/x")])
    assert provenance.command_line() == "lmcore sweep runs/x"


def test_driver_is_asked_of_nvidia_smi(monkeypatch):
    monkeypatch.setattr(provenance.shutil, "which", lambda name: f"/usr/bin/{name}")

    def answers(stdout: str, code: int) -> None:
        done = subprocess.CompletedProcess([], code, stdout=stdout, stderr="")
        monkeypatch.setattr(provenance.subprocess, "run", lambda *_, **__: done)

    answers("570.86.15\n570.86.15\n", 0)
    assert provenance.gpu_driver() == "570.86.15"
    answers("no devices were found\n", 6)
    assert provenance.gpu_driver() is None
