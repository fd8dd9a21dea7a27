"""Tasks of a sweep as processes of their own: side by side, on the same cell, stopped by signals."""

import os
import signal

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from sweep_definitions import BENCHMARK, start, training_sweep, wait_for, written

from lmcore.errors import EXIT_INTERRUPTED, UserError
from lmcore.workbook.jobs.sweep_definition import cell_names, load_definition
from lmcore.workbook.jobs.sweeps import cell_states, run_definition, run_folder


@pytest.fixture
def training(embedded_data) -> dict:
    return training_sweep(embedded_data)


def test_data_are_prepared_once_by_tasks_side_by_side(tmp_path, training):
    training["base"] |= {"data": "embedded", "tokenizer": "bpe:300", "num_documents": 100}
    path, out = written(tmp_path, training), tmp_path / "out"
    tasks = [start(path, "--out", out, "--task", number) for number in range(3)]
    said = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    assert sum("encode train" in text for text in said) == 1
    definition = load_definition(path)
    assert {state for state, _ in cell_states(definition, out).values()} == {"complete"}
    with pytest.raises(UserError, match=r"other settings of the data \(num_documents\)"):
        run_definition(load_definition(path, ["num_documents=50"]), out)


def test_a_task_that_is_stopped_goes_on_to_the_weights_of_an_undisturbed_one(tmp_path, training):
    training["base"] |= {"steps": 3000, "checkpoint_interval": 3000, "log_interval": 1, "eval_interval": 3000}
    path, out = written(tmp_path, training), tmp_path / "out"
    run = run_folder(out, "lr_0.01")
    task = start(path, "--out", out, "--task", 1)
    wait_for(lambda: run.metrics_file.exists() and len(run.metrics_lines()) > 2, task)
    task.send_signal(signal.SIGUSR1)
    said = task.communicate()[0]
    assert task.returncode == EXIT_INTERRUPTED, said
    definition = load_definition(path)
    assert cell_states(definition, out)["lr_0.01"][0] == "stopped"
    assert 0 < run.status()["step"] < 3000
    task = start(path, "--out", out, "--task", 1)
    said = task.communicate()[0]
    assert task.returncode == 0, said
    assert "goes on from step" in said
    assert run_definition(definition, tmp_path / "straight", task=1) == 0
    straight = run_folder(tmp_path / "straight", "lr_0.01")
    mine, theirs = (load_file(each.last_weights) for each in (run, straight))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)


def test_a_signal_before_training_ends_with_75_too(tmp_path, training):
    training["base"] |= {"data": "embedded", "tokenizer": "bpe:300", "num_documents": 100}
    path, out = written(tmp_path, training), tmp_path / "out"
    (out / "data").mkdir(parents=True)
    with FileLock(out / "data" / ".lock"):  # as if another task were preparing the data
        task = start(path, "--out", out, "--task", 0)
        wait_for((out / "sweep.yaml").exists, task)
        task.send_signal(signal.SIGUSR1)
        assert task.wait(timeout=60) == EXIT_INTERRUPTED
    assert "SIGUSR1: stopping" in task.communicate()[0]


def test_tasks_measure_other_cells_of_one_folder_side_by_side_and_never_the_same(tmp_path):
    path, out = written(tmp_path, BENCHMARK | {"base": BENCHMARK["base"] | {"steps": 100_000}}), tmp_path / "out"
    names = cell_names(load_definition(path))
    locks = [out / "cells" / f".{name}.lock" for name in names]
    tasks = [start(path, "--out", out, "--task", number) for number in range(2)]
    for task, lock in zip(tasks, locks, strict=True):
        wait_for(lock.exists, task)
    again = start(path, "--out", out, "--task", 0)
    said = again.communicate()[0]
    assert again.returncode == 2, said
    assert f"Another process is measuring {names[0]}" in said
    assert [state for state, _ in cell_states(load_definition(path), out).values()] == ["running", "running"]
    tasks[0].send_signal(signal.SIGUSR1)
    os.killpg(tasks[1].pid, signal.SIGTERM)  # what a scheduler does that cancels a job: all of its processes
    said = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [EXIT_INTERRUPTED] * 2, said
    assert [state for state, _ in cell_states(load_definition(path), out).values()] == ["stopped", "stopped"]
    assert not list((out / "cells").glob("*.json"))  # a cell that was stopped has not failed
