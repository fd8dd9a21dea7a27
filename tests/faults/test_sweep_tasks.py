"""Tasks of a sweep as processes of their own: side by side, on the same cell, stopped by signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fault_bench import wait_until
from filelock import FileLock
from sweep_definitions import BENCHMARK, loaded, training_sweep

from lmcore.checkpoint import digest, read_weights
from lmcore.errors import EXIT_INTERRUPTED, UserError
from lmcore.workbook.jobs.sweep_definition import run_names
from lmcore.workbook.jobs.sweeps import run_definition, run_folder, run_states

UNPREPARED = {"data": "embedded", "tokenizer": "bpe:300", "num_documents": 100}


@pytest.fixture
def training(embedded_data) -> dict:
    return training_sweep(embedded_data)


def start(folder: Path, task: int) -> subprocess.Popen:
    """A task of the definition in a folder, as a process of its own with the results in out/."""
    words = ["sweep", "run", folder / "definition.yaml", "--out", folder / "out", "--task", task]
    command = [sys.executable, "-m", "lmcore", *map(str, words)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=variables, start_new_session=True, **pipes)


def end(tasks: list[subprocess.Popen], code: int) -> list[str]:
    """Waits for tasks that are to end with this code; returns what they said."""
    said = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [code] * len(tasks), said
    return said


def states(definition, out: Path) -> list[str]:
    return [state for state, _ in run_states(definition, out).values()]


def test_data_are_prepared_once_by_tasks_side_by_side(tmp_path, training):
    training["base"] |= UNPREPARED
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    said = end([start(tmp_path, number) for number in range(3)], 0)
    assert sum("encode train" in text for text in said) == 1
    assert states(definition, out) == ["complete"] * 3
    with pytest.raises(UserError, match=r"other settings of the data \(num_documents\)"):
        run_definition(loaded(tmp_path, training, "num_documents=50"), out)


def test_a_task_that_is_stopped_goes_on_to_the_weights_of_an_undisturbed_one(tmp_path, training):
    training["base"] |= {"steps": 1500, "checkpoint_interval": 1500, "log_interval": 1, "eval_interval": 1500}
    definition, out = loaded(tmp_path, training), tmp_path / "out"
    run, straight = (run_folder(folder, "lr_0.01") for folder in (out, tmp_path / "straight"))
    task = start(tmp_path, 1)
    wait_until(lambda: run.metrics_file.exists() and len(run.metrics_lines()) > 2, "the task trains")
    task.send_signal(signal.SIGUSR1)
    end([task], EXIT_INTERRUPTED)
    assert states(definition, out)[1] == "stopped"
    assert 0 < run.status()["step"] < 1500
    assert "resuming from step" in end([start(tmp_path, 1)], 0)[0]
    assert run_definition(definition, tmp_path / "straight", task=1) == 0
    assert digest(read_weights(run.last_weights)[0]) == digest(read_weights(straight.last_weights)[0])


def test_a_signal_before_training_ends_with_75_too(tmp_path, training):
    training["base"] |= UNPREPARED
    loaded(tmp_path, training)
    (tmp_path / "out" / "data").mkdir(parents=True)
    with FileLock(tmp_path / "out" / "data" / ".lock"):  # as if another task were preparing the data
        task = start(tmp_path, 0)
        wait_until((tmp_path / "out" / "sweep.yaml").exists, "the task has begun")
        task.send_signal(signal.SIGUSR1)
        assert "SIGUSR1: stopping" in end([task], EXIT_INTERRUPTED)[0]


def test_tasks_measure_other_cells_of_one_folder_side_by_side_and_never_the_same(tmp_path):
    definition = loaded(tmp_path, BENCHMARK | {"base": BENCHMARK["base"] | {"steps": 100_000}})
    runs_of, names = tmp_path / "out" / "cases", run_names(definition)
    tasks = [start(tmp_path, number) for number in range(2)]
    for name in names:
        wait_until((runs_of / f".{name}.lock").exists, f"{name} is measured")
    assert f"Another process is measuring {names[0]}" in end([start(tmp_path, 0)], 2)[0]
    assert states(definition, tmp_path / "out") == ["running", "running"]
    tasks[0].send_signal(signal.SIGUSR1)
    os.killpg(tasks[1].pid, signal.SIGTERM)  # what a scheduler does that cancels a job: all of its processes
    end(tasks, EXIT_INTERRUPTED)
    assert states(definition, tmp_path / "out") == ["stopped", "stopped"]
    assert not list(runs_of.glob("*.json"))  # a cell that was stopped has not failed
