"""When a job that was stopped is queued again, and the ledger that says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.errors import UserError
from lmcore.workbook.jobs.ledger import JobRecord, StateLine, append_state, read_jobs, states, write_job
from lmcore.workbook.jobs.requeue import progress, requeue

LOCAL = {"LMCORE_JOB_ID": "local-1"}


def checkpoint(out: Path, step: int, run: str = "runs/base") -> None:
    """What the trainer leaves: its name is all that counts."""
    path = out / run / "checkpoints" / f"step_{step:08d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def cell(out: Path, name: str, outcome: str) -> None:
    """A record as `lmcore.profiling.runner` writes it: in this order."""
    path = out / "runs" / "benchmark" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"cell": name, "config": {"a": 1}, "outcome": outcome, "result": "x" * 99_999}, indent=2)
    )


def notebook(out: Path, name: str, state: str) -> None:
    """A record as `lmcore.workbook` writes it."""
    path = out / "notebooks" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "state": state}))


def test_progress_is_what_is_saved(tmp_path):
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 7, "runs/other")
    (tmp_path / "runs" / "base" / "checkpoints" / ".step_00000030.pt.99.tmp").touch()
    for name, outcome in (("one", "complete"), ("two", "out of memory"), ("three", "failed")):
        cell(tmp_path, name, outcome)
    notebook(tmp_path, "01_build", "done")
    notebook(tmp_path, "02_train", "stopped")
    (tmp_path / "notebooks" / "03_generate.json").write_text("{")
    assert progress(tmp_path) == {
        "runs/base/checkpoints": 20,
        "runs/other/checkpoints": 7,
        "runs/benchmark/one.json": 1,
        "runs/benchmark/two.json": 1,
        "notebooks/01_build.json": 1,
    }


def test_the_record_of_a_measured_cell_is_recognised(tmp_path):
    """Held against the function that writes it."""
    from lmcore.config import model_config
    from lmcore.profiling.runner import run_cases
    from lmcore.profiling.timing import measure
    from lmcore.profiling.workload import WorkloadConfig

    model = model_config("smoke", vocab_size=16, context_length=8)
    config = WorkloadConfig(model=model, batch_size=1, device="cpu", warmup_steps=1, steps=1)
    run_cases(measure, {"tiny": config}, tmp_path / "cells")
    assert progress(tmp_path) == {"cells/tiny.json": 1}


@pytest.mark.parametrize(
    "saves",
    [
        lambda out: checkpoint(out, 20),
        lambda out: checkpoint(out, 1, "runs/new"),
        lambda out: cell(out, "one", "complete"),
        lambda out: notebook(out, "01_build", "done"),
    ],
    ids=["steps", "run", "cell", "notebook"],
)
def test_whatever_is_saved_counts_and_a_pause_is_forgiven(tmp_path, saves):
    checkpoint(tmp_path, 10)
    assert requeue(tmp_path, 2, LOCAL)
    assert requeue(tmp_path, 2, LOCAL)  # in vain, once
    saves(tmp_path)
    assert requeue(tmp_path, 2, LOCAL)
    assert requeue(tmp_path, 2, LOCAL)  # in vain, once again
    assert not requeue(tmp_path, 2, LOCAL)
    assert [line.state for line in states(tmp_path, "local-1")] == ["requeued"] * 4 + ["gave up"]


def test_a_run_that_starts_over_has_not_got_further(tmp_path):
    checkpoint(tmp_path, 10)
    assert requeue(tmp_path, 1, LOCAL)
    (tmp_path / "runs" / "base" / "checkpoints" / "step_00000010.pt").rename(tmp_path / "elsewhere.pt")
    checkpoint(tmp_path, 4)
    assert not requeue(tmp_path, 1, LOCAL)


def test_each_job_is_judged_by_its_own_stops(tmp_path):
    assert requeue(tmp_path, 2, LOCAL)
    assert requeue(tmp_path, 2, {"LMCORE_JOB_ID": "local-2"})
    assert not requeue(tmp_path, 2, LOCAL)


def test_a_task_of_a_sweep_is_judged_by_its_own_cell(tmp_path):
    (tmp_path / "sweep.yaml").write_text(
        "name: lr\nkind: train\nbase: {recipe: smoke}\nvary: {optimizer.learning_rate: [0.1, 0.2]}\n"
    )
    second = {"LMCORE_JOB_ID": "local-1_1", "SLURM_ARRAY_TASK_ID": "1"}
    assert requeue(tmp_path, 2, second)
    checkpoint(tmp_path, 10, "runs/lr_0.1")
    assert not requeue(tmp_path, 2, second)
    checkpoint(tmp_path, 10, "runs/lr_0.2")
    assert requeue(tmp_path, 2, second)


def test_a_damaged_note_of_the_last_stop_counts_as_none(tmp_path):
    assert requeue(tmp_path, 1, LOCAL | {"LMCORE_JOB_ID": "x"}) is False
    checkpoint(tmp_path, 1)
    for damage in ("{", '{"vain": 0, "found": {"checkpoints": "1"}}'):
        (tmp_path / "jobs" / "local-1.progress.json").write_text(damage)
        assert requeue(tmp_path, 1, LOCAL)


def slurm(folder: Path, script: str, monkeypatch) -> Path:
    """A stand-in for scontrol; returns the file into which it writes its arguments."""
    program = folder / "scontrol"
    program.write_text(f'#!/bin/bash\necho "$@" >> "{folder}/called"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "called"


def test_slurm_is_asked_by_the_name_of_the_task(tmp_path, monkeypatch):
    """By the number of its last task Slurm would requeue the whole array."""
    called = slurm(tmp_path, "exit 0", monkeypatch)
    assert requeue(tmp_path / "out", 3, {"LMCORE_JOB_ID": "7_3", "SLURM_JOB_ID": "7"})
    assert called.read_text() == "requeue 7_3\n"
    assert requeue(tmp_path / "out", 3, LOCAL)
    assert called.read_text() == "requeue 7_3\n"  # not for a job without Slurm


def test_slurms_refusal_is_reported(tmp_path, monkeypatch):
    slurm(tmp_path, "echo 'slurm_requeue error: Requested operation is presently disabled' >&2; exit 1", monkeypatch)
    with pytest.raises(UserError, match=r"scontrol: .*Requested operation is presently disabled"):
        requeue(tmp_path / "out", 3, {"LMCORE_JOB_ID": "7", "SLURM_JOB_ID": "7"})
    assert [line.state for line in states(tmp_path / "out", "7")] == ["requeued", "gave up"]


def test_outside_of_a_job_it_is_refused(tmp_path):
    with pytest.raises(UserError, match="This is for jobs"):
        requeue(tmp_path, 3, {})
    with pytest.raises(UserError, match="--attempts must be at least 1"):
        requeue(tmp_path, 0, LOCAL)


def test_it_does_not_wait_for_pytorch():
    """The time limit is near when it is called."""
    program = "import sys, lmcore.cli.jobs, lmcore.workbook.jobs.requeue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def record(id: str, submitted: str = "2026-01-01T00:00:00+00:00", **fields: object) -> JobRecord:
    """A job of the ledger."""
    return JobRecord(id, f"job {id}", "sweep", "jobs/a.sbatch", "/logs/100%%/a-%A_%a.log", submitted, **fields)


def test_jobs_come_back_in_the_order_of_submission(tmp_path):
    jobs = [record("9"), record("10", after=["9"], tasks=[0, 3]), record("2", "2026-01-02T00:00:00+00:00")]
    for job in reversed(jobs):
        write_job(tmp_path, job)
    requeue(tmp_path, 3, {"LMCORE_JOB_ID": "9"})  # leaves a file of its own beside them
    assert read_jobs(tmp_path) == jobs
    assert read_jobs(tmp_path / "nowhere") == []
    assert jobs[1].task_ids == ["10_0", "10_3"]
    assert jobs[1].log_file(3) == Path("/logs/100%/a-10_3.log")


def test_a_damaged_record_is_named(tmp_path):
    write_job(tmp_path, record("9"))
    (tmp_path / "jobs" / "10.json").write_text('{"id": "10"}')
    with pytest.raises(UserError, match=r"10\.json is not the record of a job"):
        read_jobs(tmp_path)
    (tmp_path / "jobs" / "10.json").write_text(json.dumps({**vars(record("10")), "kind": "party"}))
    with pytest.raises(UserError, match="kind must be one of workbook"):
        read_jobs(tmp_path)
    for id in ("9", "", "10; rm", "local-10"):
        (tmp_path / "jobs" / "10.json").write_text(json.dumps({**vars(record("10")), "id": id}))
        with pytest.raises(UserError, match=f"it cannot be of job '{id}'"):
            read_jobs(tmp_path)
    (tmp_path / "jobs" / "10.json").unlink()
    (tmp_path / "jobs" / "local-x.json").write_text(json.dumps({**vars(record("local-x")), "scheduler": "local"}))
    with pytest.raises(UserError, match="it cannot be of job 'local-x'"):
        read_jobs(tmp_path)


def test_states_are_read_as_they_were_written_without_a_torn_line(tmp_path):
    for line in ("running n1 restart 0", "requeued", "running n2 restart 1", "gave up", "exit 75", "cancelled"):
        append_state(tmp_path, "7", line)
    with open(tmp_path / "jobs" / "7.state", "a") as file:
        file.write("2026-01-01T00:00:00+00:00 runn")
    found = states(tmp_path, "7")
    assert [line.state for line in found] == ["running", "requeued", "running", "gave up", "exit", "cancelled"]
    assert found[2] == StateLine("7", found[2].time_utc, "running", host="n2", restart=1)
    assert found[4].code == 75


def test_the_states_of_an_array_are_those_of_its_tasks(tmp_path):
    append_state(tmp_path, "7_0", "exit 0")
    append_state(tmp_path, "7_11", "exit 1")
    append_state(tmp_path, "71_0", "exit 2")
    assert [line.job for line in states(tmp_path, "7")] == ["7_0", "7_11"]
    assert [line.code for line in states(tmp_path, "7_11")] == [1]
