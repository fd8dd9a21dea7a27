"""When a job that was stopped is queued again."""

import json
from pathlib import Path

import pytest
from job_projects import command

from lmcore.errors import UserError
from lmcore.files import write_json
from workbook.cli import main
from workbook.jobs import requeue


@pytest.fixture
def bin(tmp_path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.fixture
def scontrol(bin, monkeypatch) -> Path:
    return command(bin, "scontrol", "", monkeypatch)


def test_a_job_is_queued_again_until_it_saves_nothing_new(tmp_path, scontrol, capsys):
    """The first stop is in vain, each kind of progress is forgiven once, and two in a row are the end."""
    out = tmp_path / "out"
    progress = [
        "runs/base/config.json", "runs/base/checkpoints/step_00000010.pt",
        "runs/base/checkpoints/step_00000020.sharded",
        "runs/benchmark/small.json", "notebooks/01_build.json", "notebooks/02_train.json",
    ]  # fmt: skip
    for name in progress:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(json.dumps({"state": "running" if "02" in name else "done"}))
        requeue(out, "7", attempts=2)
    assert scontrol.read_text() == "requeue 7\n" * 6
    assert main(["requeue", str(out), "--job", "7", "--attempts", "2"]) == 2
    assert "stopped 2 times in a row with nothing new saved" in capsys.readouterr().err
    assert scontrol.read_text() == "requeue 7\n" * 6


def test_a_checkpoint_that_is_removed_and_made_again_is_no_progress(tmp_path, scontrol):
    first, second = (tmp_path / "run" / "checkpoints" / f"step_{step}.pt" for step in (10, 20))
    first.parent.mkdir(parents=True)
    for file, others in ((first, second), (second, first)):
        file.touch()
        others.unlink(missing_ok=True)
        requeue(tmp_path, "7", attempts=1)
    second.rename(first)
    with pytest.raises(UserError, match="nothing new saved"):
        requeue(tmp_path, "7", attempts=1)


def test_a_task_of_a_sweep_is_judged_by_its_own_run(tmp_path, scontrol):
    write_json(tmp_path / "sweep.json", {"a": {}, "b": {}})
    (tmp_path / "a" / "checkpoints" / "step_10.pt").mkdir(parents=True)
    requeue(tmp_path, "7_0", attempts=1)
    with pytest.raises(UserError, match="nothing new saved"):
        requeue(tmp_path, "7_1", attempts=1)
