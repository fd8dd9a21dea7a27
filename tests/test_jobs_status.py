"""`workbook status`, and when a job that was stopped is queued again."""

import json
from pathlib import Path

import pytest
from job_projects import command

from lmcore.files import write_json
from workbook.cli import main
from workbook.jobs.requeue import requeue
from workbook.jobs.status import last_line

CHAIN = [("17", "02_train"), ("18", "03_generate"), ("19", "04_benchmark"), ("20", "05_nsys")]


def submit(out: Path, *jobs: tuple[str, str], log: str = "") -> None:
    """What `workbook submit` notes of jobs."""
    rows = [{"id": id, "name": name, "log": f"{out}/jobs/{name}-{id}{log}.log"} for id, name in jobs]
    write_json(out / "jobs" / "submitted.json", rows)


def shown(capsys, *outs: Path) -> list[list[str]]:
    """The lines of the table, each as id, name, state and the rest."""
    assert main(["status", *map(str, outs)]) == 0
    return [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


def test_it_joins_squeue_sacct_logs_and_metrics(tmp_path, monkeypatch, capsys):
    out, bin = tmp_path / "out", tmp_path / "bin"
    bin.mkdir()
    submit(out, *CHAIN)
    (out / "jobs" / "02_train-17.log").write_text("begun\nworkbook: 3 s\rworkbook: cell 4\n\n")
    (out / "jobs" / "04_benchmark-19.log").write_text("\x1b[31mZeroDivisionError\x1b[0m\n")
    command(bin, "squeue", "echo '17|RUNNING|None'; echo '18|PENDING|Dependency'", monkeypatch)
    command(bin, "sacct", "echo '19|FAILED'", monkeypatch)
    run = out / "runs" / "base"
    write_json(run / "status.json", {"state": "running", "step": 0})
    write_json(run / "config.json", {"steps": 5000})
    (run / "metrics.jsonl").write_text('{"step": 1200, "train_loss": 2.5}\n{"step": 12')
    assert shown(capsys, out) == [
        ["17", "02_train", "running", "workbook: cell 4"],
        ["18", "03_generate", "pending", "Dependency"],
        ["19", "04_benchmark", "failed", f"ZeroDivisionError (log: {out}/jobs/04_benchmark-19.log)"],
        ["20", "05_nsys", "ended"],
        ["training", "base:", "step", "1,200/5,000, loss 2.500"],
    ]
    assert (bin / "sacct.called").read_text().endswith("--jobs=19,20\n")
    command(bin, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", monkeypatch)
    assert main(["status", str(out)]) == 0
    assert "Slurm does not answer (squeue: slurm_load_jobs error: Unable" in capsys.readouterr().out


def test_the_tasks_of_an_array_have_their_own_logs(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    submit(out, ("7", "rates"), log="_*")
    (out / "jobs" / "rates-7_1.log").write_text("lmcore: no luck\n")
    lines = [
        "7_0|COMPLETED|None",
        "7_1|FAILED|NonZeroExitCode",
        "7_2|RUNNING|None",
        "7_[3-5%2]|PENDING|JobArrayTaskLimit",
    ]
    command(tmp_path, "squeue", "\n".join(f"echo '{line}'" for line in lines), monkeypatch)
    assert shown(capsys, out) == [
        ["7_0", "rates", "completed"],
        ["7_1", "rates", "failed", f"lmcore: no luck (log: {out}/jobs/rates-7_1.log)"],
        ["7_2", "rates", "running"],
        ["7_[3-5%2]", "rates", "pending", "JobArrayTaskLimit"],
    ]


def test_the_last_line_of_a_log(tmp_path):
    (tmp_path / "log").write_bytes(b"first\n" + b"x" * 200_000 + b"\nlast \xff\r\n \n")
    assert last_line(str(tmp_path / "log")) == "last \ufffd"
    assert last_line(str(tmp_path / "nowhere")) == ""


@pytest.fixture
def scontrol(tmp_path, monkeypatch) -> Path:
    (tmp_path / "bin").mkdir()
    return command(tmp_path / "bin", "scontrol", "", monkeypatch)


def test_a_job_is_queued_again_until_it_saves_nothing_new(tmp_path, scontrol, capsys):
    """The first stop is in vain, each kind of progress is forgiven once, and two in a row are the end."""
    out, found = tmp_path / "out", []
    progress = [
        "runs/base/config.json", "runs/base/checkpoints/step_00000010.pt",
        "runs/base/checkpoints/step_00000020.sharded",
        "runs/benchmark/small.json", "notebooks/01_build.json", "notebooks/02_train.json",
    ]  # fmt: skip
    for name in progress:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(json.dumps({"state": "running" if "02" in name else "done"}))
        found.append(requeue(out, "7", attempts=2))
    found.append(requeue(out, "7", attempts=2))
    assert found == [True, True, True, True, True, True, False]
    assert scontrol.read_text() == "requeue 7\n" * 6
    assert main(["requeue", str(out), "--job", "7", "--attempts", "2"]) == 1
    assert "stopped 2 times in a row with nothing new saved" in capsys.readouterr().err


def test_a_checkpoint_that_is_removed_and_made_again_is_no_progress(tmp_path, scontrol):
    first, second = (tmp_path / "run" / "checkpoints" / f"step_{step}.pt" for step in (10, 20))
    first.parent.mkdir(parents=True)
    for file, others in ((first, second), (second, first), (first, second)):
        file.touch()
        others.unlink(missing_ok=True)
        last = requeue(tmp_path, "7", attempts=1)
    assert not last


def test_a_task_of_a_sweep_is_judged_by_its_own_run(tmp_path, scontrol):
    write_json(tmp_path / "sweep.json", {"a": {}, "b": {}})
    (tmp_path / "a" / "checkpoints" / "step_10.pt").mkdir(parents=True)
    assert requeue(tmp_path, "7_0", attempts=1)
    assert not requeue(tmp_path, "7_1", attempts=1)
