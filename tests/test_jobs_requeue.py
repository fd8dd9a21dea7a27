"""When a job that was stopped is queued again, and the job log that says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_projects import command, states

from lmcore.errors import UserError
from lmcore.workbook.jobs.log import append, own_state, read_lines, read_log
from lmcore.workbook.jobs.requeue import progress, requeue
from lmcore.workbook.record import NotebookRecord, write_notebook_record

LOCAL = {"LMCORE_JOB_ID": "local-1"}


def checkpoint(out: Path, step: int, run: str = "runs/base") -> None:
    """What the trainer leaves: its name is all that counts."""
    path = out / run / "checkpoints" / f"step_{step:08d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def record(out: Path, file: str, **values: str) -> None:
    """A JSON file with its values in this order: of a measurement by `profiling.runner`, of a notebook."""
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    (out / file).write_text(json.dumps(values | {"more": "x" * 99_999}, indent=2))


def test_progress_is_what_is_saved(tmp_path):
    for step, run in ((5, "runs/base"), (20, "runs/base"), (7, "runs/other")):
        checkpoint(tmp_path, step, run)
    (tmp_path / "runs" / "base" / "checkpoints" / ".step_00000030.pt.99.tmp").touch()
    for name, outcome in (("one", "complete"), ("two", "out of memory"), ("three", "failed")):
        record(tmp_path, f"runs/benchmark/{name}.json", case=name, config="", outcome=outcome)
    record(tmp_path, "notebooks/01_build.json", name="01_build", state="done")
    record(tmp_path, "notebooks/02_train.json", name="02_train", state="stopped")
    (tmp_path / "notebooks" / "03_generate.json").write_text("{")
    assert progress(tmp_path) == {
        "runs/base/checkpoints": 20,
        "runs/other/checkpoints": 7,
        "runs/benchmark/one.json": 1,
        "runs/benchmark/two.json": 1,
        "notebooks/01_build.json": 1,
    }


def test_the_record_of_a_notebook_is_recognised(tmp_path):
    """Held against the function that writes it."""
    write_notebook_record(tmp_path, NotebookRecord("01_build", "done", parameters={"steps": 3}))
    assert progress(tmp_path) == {"notebooks/01_build.json": 1}


def test_the_record_of_a_measured_cell_is_recognised(tmp_path):
    """Held against the function that writes it."""
    from lmcore.config import model_config
    from lmcore.profiling.runner import run_cases
    from lmcore.profiling.timing import measure
    from lmcore.profiling.workload import WorkloadConfig

    model = model_config("smoke", vocab_size=16, context_length=8)
    config = WorkloadConfig(model=model, batch_size=1, device="cpu", warmup_steps=1, steps=1)
    run_cases(measure, {"tiny": config}, tmp_path / "cases")
    assert progress(tmp_path) == {"cases/tiny.json": 1}


@pytest.mark.parametrize(
    "saves",
    [
        lambda out: checkpoint(out, 20),
        lambda out: checkpoint(out, 1, "runs/new"),
        lambda out: record(out, "runs/benchmark/one.json", case="one", outcome="complete"),
        lambda out: record(out, "notebooks/01_build.json", name="01_build", state="done"),
    ],
    ids=["steps", "run", "case", "notebook"],
)
def test_whatever_is_saved_counts_and_a_pause_is_forgiven(tmp_path, saves):
    checkpoint(tmp_path, 10)
    assert requeue(tmp_path, 2, LOCAL)
    assert requeue(tmp_path, 2, LOCAL)  # in vain, once
    saves(tmp_path)
    assert requeue(tmp_path, 2, LOCAL)
    assert requeue(tmp_path, 2, LOCAL)  # in vain, once again
    assert not requeue(tmp_path, 2, LOCAL)
    assert states(tmp_path, "local-1") == ["requeued"] * 4 + ["gave-up"]


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
    for damage in ("{", '{"in_vain": 0, "found": {"checkpoints": "1"}}'):
        (tmp_path / "jobs" / "local-1.progress.json").write_text(damage)
        assert requeue(tmp_path, 1, LOCAL)


def test_slurm_is_asked_by_the_name_of_the_task_and_its_refusal_is_reported(tmp_path, monkeypatch):
    """By the number of its last task Slurm would requeue the whole array."""
    called = command(tmp_path, "scontrol", "exit 0", monkeypatch)
    assert requeue(tmp_path / "out", 3, {"LMCORE_JOB_ID": "7_3", "SLURM_JOB_ID": "7"})
    assert called.read_text() == "requeue 7_3\n"
    assert requeue(tmp_path / "out", 3, LOCAL)
    assert called.read_text() == "requeue 7_3\n"  # not for a job without Slurm
    command(tmp_path, "scontrol", "echo 'slurm_requeue error: Requested operation is presently disabled' >&2; exit 1")
    with pytest.raises(UserError, match=r"scontrol: .*Requested operation is presently disabled"):
        requeue(tmp_path / "out", 3, {"LMCORE_JOB_ID": "7", "SLURM_JOB_ID": "7"})
    assert states(tmp_path / "out", "7") == ["requeued", "gave-up"]


def test_outside_of_a_job_it_is_refused(tmp_path):
    with pytest.raises(UserError, match="This is for jobs"):
        requeue(tmp_path, 3, {})
    with pytest.raises(UserError, match="--attempts must be at least 1"):
        requeue(tmp_path, 0, LOCAL)


def test_it_does_not_wait_for_pytorch():
    """The time limit is near when it is called."""
    program = "import sys, lmcore.cli.jobs, lmcore.workbook.jobs.requeue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_jobs_come_back_as_they_were_submitted(tmp_path):
    append(tmp_path, "9", "first", "submitted", kind="notebook")
    append(tmp_path, "10", "rates", "submitted", kind="sweep", after="9", tasks="0,3-4")
    append(tmp_path, "9", "first", "running", host="n1", restart=0)
    first, array = read_log(tmp_path)
    assert (first.id, first.name, first.kind, first.after, first.task_ids) == ("9", "first", "notebook", [], ["9"])
    assert (array.kind, array.after, array.task_ids) == ("sweep", ["9"], ["10_0", "10_3", "10_4"])
    assert first.lines["9"][0].values == {"host": "n1", "restart": "0"}
    assert read_log(tmp_path / "nowhere") == []


def test_lines_that_are_torn_or_foreign_are_left_out(tmp_path):
    append(tmp_path, "7", "job", "running", host="n1", restart=0)
    with open(tmp_path / "jobs.log", "ab") as file:
        file.write(b"2026-01-01 7 job\n\xff\x00\n2026-01-01 ../7 job exit code=0\n2026-01-01 7 job exi")
    append(tmp_path, "7", "job", "exit", code=1)  # goes on after the torn line, and is lost with it
    append(tmp_path, "7", "job", "exit", code=2)
    assert [line.values for line in read_lines(tmp_path)] == [{"host": "n1", "restart": "0"}, {"code": "2"}]


def test_the_lines_of_a_task_are_its_own(tmp_path):
    for id, code in (("7_0", 0), ("7_11", 1), ("71_0", 2)):
        append(tmp_path, id, "rates", "exit", code=code)
    assert [job.id for job in read_log(tmp_path)] == ["7", "71"]
    assert [*read_log(tmp_path)[0].lines] == ["7_0", "7_11"]
    assert read_log(tmp_path)[0].lines["7_11"][0].values == {"code": "1"}


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ([], "not run"),
        (["running"], "running"),
        (["running", "requeued"], "requeued"),
        (["running", "gave-up", "exit 75"], "gave up"),
        (["running", "gave-up", "exit 75", "running"], "running"),  # an operator queued it again
        (["running", "exit 0"], "completed"),
        (["running", "exit 75"], "stopped"),
        (["running", "stopping"], "stopped"),  # killed soon afterwards
        (["running", "exit 1"], "failed"),
        (["cancelled"], "cancelled"),
    ],
)
def test_the_state_of_a_job_is_what_it_last_wrote(tmp_path, said, state):
    for word, _, code in (line.partition(" ") for line in said):
        append(tmp_path, "7", "job", word, code=code)
    assert own_state(read_lines(tmp_path)) == state
