"""Training runs that a notebook follows, the workers of a sweep, and `workbook sweep`."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
from job_projects import SWEEP

from lmcore.config import TrainConfig, replace, to_dict
from lmcore.errors import EXIT_INTERRUPTED, UserError
from lmcore.files import write_json
from lmcore.run import RunFolder
from workbook import sweep
from workbook.cli import main
from workbook.sweep import planned, run_sweep, work

SWEEPS = Path(__file__).parents[1] / "papermill_jobs" / "sweeps"


@pytest.fixture
def config(tiny_run) -> TrainConfig:
    return replace(tiny_run, optimizer__max_grad_norm=None)


def test_visible_gpus_are_named_as_cuda_does(monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: True)
    for variable, count, expected in (("", 2, ["0", "1"]), ("GPU-a,5,7", 2, ["GPU-a", "5"]), ("", 0, [])):
        monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert sweep.visible_gpus() == expected


def test_a_sweep_is_followed_to_its_end_and_its_runs_are_reused_and_repaired(tmp_path, config, capsys):
    runs = {"good": config, "bad": replace(config, optimizer__name="sgd", optimizer__learning_rate=1e30)}
    folders = run_sweep(runs, tmp_path, workers=2)
    assert {name: run.status()["state"] for name, run in folders.items()} == {"good": "complete", "bad": "diverged"}
    assert math.isfinite(folders["good"].status()["valid_loss"])
    assert "12/12" in capsys.readouterr().out
    written = folders["good"].metrics_file.stat().st_mtime_ns
    run_sweep(runs, tmp_path, workers=2)
    assert f"{tmp_path.name}: all 2 runs reused" in capsys.readouterr().out
    assert folders["good"].metrics_file.stat().st_mtime_ns == written
    folders["good"].last_weights.write_bytes(b"")
    assert run_sweep({"good": config}, tmp_path)["good"].last_weights.stat().st_size > 0


def test_a_child_that_fails_speaks_through_the_parent(tmp_path, config, monkeypatch):
    started, start = [], sweep._start

    def once(*given):
        assert not started, "a run that failed was begun again"
        started.append(given)
        return start(*given)

    monkeypatch.setattr(sweep, "_start", once)
    with pytest.raises(UserError, match=r"ended with code 2: workbook: .*set model\.vocab_size"):
        run_sweep({"run": replace(config, model__vocab_size=20)}, tmp_path)


CELL = """
import json, signal, sys
from lmcore.config import TrainConfig, from_dict
from lmcore.errors import UserError
from workbook.sweep import run_sweep
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a kernel, however the tests were started
try:
    run_sweep({"toy": from_dict(TrainConfig, json.loads(sys.argv[2]))}, sys.argv[1])
except UserError as error:
    print(error)
"""
PATIENCE = 240


def test_an_interrupted_cell_ends_its_run(tmp_path, config):
    config = replace(config, steps=10**9, log_interval=50, eval_interval=10**9, checkpoint_interval=10**9)
    run, deadline = RunFolder(tmp_path / "toy"), time.monotonic() + PATIENCE
    words = [sys.executable, "-c", CELL, str(tmp_path), json.dumps(to_dict(config))]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (run.is_busy() and run.metrics_lines()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (trainer,) = psutil.Process(owner.pid).children()
    owner.send_signal(signal.SIGINT)
    said = owner.communicate(timeout=PATIENCE)[0]
    ended = "Interrupted: training has ended, too; run this again to resume it from what is saved."
    assert said.splitlines()[-1] == ended
    assert "Traceback" not in said
    assert not trainer.is_running()
    assert run.status()["state"] == "interrupted"
    assert list(run.checkpoint_folder.iterdir())


def test_a_worker_leaves_a_run_in_other_hands_and_refuses_what_is_no_mapping(tmp_path, config):
    write_json(tmp_path / "sweep.json", {"taken": {"data": config.data}})
    taken = RunFolder(tmp_path / "taken")
    with taken.lock():
        work(tmp_path)
    assert taken.status()["state"] == "new"
    write_json(tmp_path / "sweep.json", [1])
    with pytest.raises(UserError, match=r"sweep\.json must be a mapping"):
        work(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_worker_stops_between_two_runs(tmp_path, config, monkeypatch, number):
    trained = []

    def train(_, run):
        trained.append(run.name)
        os.kill(os.getpid(), number)
        return types.SimpleNamespace(state="complete")

    monkeypatch.setattr("workbook.sweep.train", train)
    write_json(tmp_path / "sweep.json", {name: {"data": config.data} for name in ("a", "b")})
    with pytest.raises(SystemExit) as ended:
        work(tmp_path)
    assert (ended.value.code, trained) == (EXIT_INTERRUPTED, ["a"])
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_sweep_is_a_file_of_runs_that_tasks_share(tmp_path, embedded_data, capsys):
    file, out = tmp_path / "rates.py", tmp_path / "out"
    file.write_text(SWEEP.format(rates=[0.01, 1e30, 0.02]))  # the second diverges
    words = ["sweep", file, "--data", embedded_data, "--recipe", "smoke", "--steps", 4, "--out", out]
    words = [str(word) for word in words]

    def states() -> dict[str, str]:
        return {run.name: run.status()["state"] for run in map(RunFolder, out.iterdir()) if run.config_file.exists()}

    with RunFolder(out / "lr_0.02").lock():  # as another task does
        assert main(words) == 0
    assert states() == {"lr_0.01": "complete", "lr_1e+30": "diverged"}
    assert main(words) == 0
    assert states() == {"lr_0.01": "complete", "lr_1e+30": "diverged", "lr_0.02": "complete"}
    assert "lr_1e+30: skipped, it is finished: diverged." in capsys.readouterr().out


@pytest.mark.parametrize("file", [*SWEEPS.glob("*.py")], ids=lambda file: file.stem)
def test_the_sweeps_of_the_project_make_configurations(file, embedded_data):
    for recipe in ("smoke", "handout"):
        runs = planned(file, embedded_data, recipe, 20)
        assert len({json.dumps(to_dict(config)) for config in runs.values()}) == len(runs) > 5
