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

from lmcore import provenance

PROJECT = Path(__file__).parents[1]


def git(folder, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_and_whether_it_holds_changes(tmp_path, monkeypatch):
    """In a checkout, in an archive of it, and installed inside of someone else's checkout."""
    house = tmp_path / "house"
    (house / "lmcore").mkdir(parents=True)
    for name in (".gitattributes", "lmcore/commit.txt", "lmcore/provenance.py"):
        shutil.copy(PROJECT / name, house / name)
    git(house, "init", "-q")
    git(house, "add", ".")
    git(house, "commit", "-qm", "a message")
    commit = git(house, "rev-parse", "HEAD")
    git(house, "archive", "-o", tmp_path / "house.tar", "HEAD")
    shutil.unpack_archive(tmp_path / "house.tar", tmp_path / "copy")
    monkeypatch.setenv("LMCORE_GIT_COMMIT", "abc123")

    def state_of(folder) -> tuple:
        monkeypatch.setattr(provenance, "__file__", str(folder / "lmcore" / "provenance.py"))
        return tuple(provenance.git_state().values())

    (house / "untracked.txt").write_text("a run's output")
    assert state_of(house) == (commit, False)
    (house / "lmcore" / "provenance.py").write_text("changed = True")
    assert state_of(house) == (commit, True)
    assert state_of(tmp_path / "copy") == (commit, None)
    (house / ".venv" / "lmcore").mkdir(parents=True)
    assert state_of(house / ".venv") == ("abc123", None)
    monkeypatch.setattr(provenance.shutil, "which", lambda _: None)  # without git
    monkeypatch.delenv("LMCORE_GIT_COMMIT")
    assert state_of(house / ".venv") == (None, None)


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


def test_the_command_is_whole_and_names_no_machine(monkeypatch):
    folder = os.path.abspath("runs/x")
    words = ["benchmarks/cpu.py", "--prompt", "two words", f"--out={folder}", "--data", "/home/text"]
    for argv, expected in (
        (["/site/workbook/__main__.py", "writeup", folder], "workbook writeup runs/x"),
        (words, "benchmarks/cpu.py --prompt 'two words' --out=runs/x --data .../text"),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert provenance.command_line() == expected


def test_the_command_in_a_kernel(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/venv/ipykernel_launcher.py", "-f", "/tmp/tmpabc.json"])
    for parent, expected in (
        ("/venv/bin/python3 /venv/bin/papermill 4.ipynb /tmp/x.ipynb -p a b", "papermill 4.ipynb .../x.ipynb -p a b"),
        ("python -m papermill 4.ipynb", "papermill 4.ipynb"),
        ("python", "python"),
    ):
        process = types.SimpleNamespace(cmdline=parent.split)
        monkeypatch.setattr(provenance.psutil, "Process", lambda _, process=process: process)
        assert provenance.command_line() == expected
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/04_benchmark.ipynb")
    assert provenance.command_line() == "notebook 04_benchmark"


FOREIGN = re.compile(
    r"ipykernel_launcher|\.json -f|-f \S*\.json|\btmp[a-z0-9_]{8}\b"
    r"|(?<![\w.])/(?:tmp|home|root|work|mnt|scratch|Users)\b"
)
"""What says nothing to others: a kernel's arguments, temporary files, folders of one machine."""


RECORDS = sorted(path for folder in ("results", "writeup") for path in (PROJECT / folder).rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=[str(path.relative_to(PROJECT)) for path in RECORDS])
def test_committed_records_say_where_they_come_from(path):
    assert FOREIGN.search("ipykernel_launcher.py -f ../../tmp2zzv2vec.json")
    assert FOREIGN.search("lmcore train --run /home/me/r")
    text = path.read_text(encoding="utf-8")
    assert not FOREIGN.search(text)
    assert not re.search(r'"(host|hostname|cwd)":', text)
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in re.findall(r'"git_commit": "([^"]*)"', text))
