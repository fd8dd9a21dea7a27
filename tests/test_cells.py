"""Sweeps of measurements: a process for each cell, outcomes as rows, nothing measured twice."""

import json
import os
import signal
import time

import pytest
import torch

from lmcore.config import replace
from lmcore.errors import UserError
from lmcore.profiling.cells import measuring_gpus, require_complete, run_cells, task_name
from lmcore.profiling.records import alone_in
from lmcore.profiling.workload import Workload, workload_config

SMALL = workload_config("smoke", context_length=8, vocab_size=32, batch_size=1, device="cpu")


def measure(config, folder):
    """A task for the tests: what it does depends on the seed."""
    if config.seed == 1:
        raise torch.OutOfMemoryError("Tried to allocate 7 GiB.\nmore")
    if config.seed == 2:
        raise ValueError("a fault in the program\nand more")
    if config.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.seed == 4:
        os._exit(9)
    if config.seed == 5:
        time.sleep(60)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "note.txt").write_text("measured", encoding="utf-8")
    return {"pid": os.getpid(), "shape": list(Workload(config).step().shape)}


def cells(**seeds):
    return {name: replace(SMALL, seed=seed) for name, seed in seeds.items()}


def test_every_cell_has_its_own_process_and_none_is_measured_twice(tmp_path, capsys):
    first = run_cells(measure, cells(a=0, b=6), tmp_path)
    assert [record["outcome"] for record in first.values()] == ["complete", "complete"]
    pids = {record["result"]["pid"] for record in first.values()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert first["a"]["result"]["shape"] == [1, 8, 32]
    assert (tmp_path / "a" / "note.txt").exists()
    assert first["a"]["environment"]["torch"] == torch.__version__
    again = run_cells(measure, cells(a=0, b=7, c=8), tmp_path)  # b has another seed, c is new
    assert "1 of 3 cells reused" in capsys.readouterr().out
    assert again["a"] == json.loads(json.dumps(first["a"]))
    assert again["b"]["result"]["pid"] != first["b"]["result"]["pid"]
    assert list(again) == ["a", "b", "c"]


def test_a_cell_without_a_result_is_a_row_and_the_next_one_runs(tmp_path):
    found = run_cells(measure, cells(oom=1, wrong=2, killed=3, left=4, fine=0), tmp_path)
    assert {name: record["outcome"] for name, record in found.items()} == {
        "oom": "out of memory",
        "wrong": "failed",
        "killed": "out of memory",
        "left": "failed",
        "fine": "complete",
    }
    assert found["oom"]["reason"] == "Tried to allocate 7 GiB."
    assert found["wrong"]["reason"] == "ValueError: a fault in the program"
    assert "SIGKILL" in found["killed"]["reason"]
    assert "exit code 9" in found["left"]["reason"]
    assert found["oom"]["result"] is None
    with pytest.raises(UserError, match="Cell wrong failed: ValueError"):
        require_complete(found)
    require_complete({"oom": found["oom"], "fine": found["fine"]})
    retried = run_cells(measure, cells(oom=1, wrong=0), tmp_path)  # a failure is tried again, a lack of memory is not
    assert retried["oom"] == json.loads(json.dumps(found["oom"]))
    assert retried["wrong"]["outcome"] == "complete"


def test_a_cell_that_hangs_is_ended(tmp_path):
    began = time.monotonic()
    record = run_cells(measure, cells(slow=5), tmp_path, timeout=1.0)["slow"]
    assert record["outcome"] == "failed"
    assert "ended after 1 s" in record["reason"]
    assert time.monotonic() - began < 40


def test_records_of_another_machine_or_damaged_ones_are_measured_again(tmp_path):
    first = run_cells(measure, cells(a=0, b=6), tmp_path)
    other = json.loads((tmp_path / "a.json").read_text())
    other["environment"]["device"] = "another GPU"
    (tmp_path / "a.json").write_text(json.dumps(other))
    (tmp_path / "b.json").write_text("{half")
    read = run_cells(measure, cells(a=0), tmp_path, foreign=True)
    assert read["a"] == other
    second = run_cells(measure, cells(a=0, b=6), tmp_path)
    assert all(second[name]["result"]["pid"] != first[name]["result"]["pid"] for name in "ab")


def test_bad_names_and_tasks_are_refused(tmp_path):
    with pytest.raises(UserError, match="must be a file name"):
        run_cells(measure, {"../a": SMALL}, tmp_path)
    with pytest.raises(UserError, match="must be a file name"):
        run_cells(measure, {"..": SMALL}, tmp_path)
    with pytest.raises(UserError, match="function at the top of a module"):
        run_cells(lambda config, folder: {}, {"a": SMALL}, tmp_path)
    assert task_name(measure).endswith("test_cells:measure")


def test_several_gpus_measure_side_by_side_each_seen_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("lmcore.profiling.cells.visible_gpus", lambda: ["3", "GPU-b"])
    anywhere = {name: replace(config, device="auto") for name, config in cells(a=0, b=1, c=2, d=3).items()}
    found = run_cells(seen, anywhere, tmp_path)
    assert list(found) == ["a", "b", "c", "d"]
    assert {record["result"]["gpu"] for record in found.values()} == {"3", "GPU-b"}


def seen(config, folder):
    """A task that takes a moment and says which GPU its process may use."""
    time.sleep(0.5)
    return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}


def test_cells_of_a_named_device_are_measured_one_at_a_time(monkeypatch):
    monkeypatch.setattr("lmcore.profiling.cells.visible_gpus", lambda: ["0", "1"])
    for device, places in (("auto", ["0", "1"]), ("cuda", ["0", "1"]), ("cpu", [None]), ("cuda:1", [None])):
        assert measuring_gpus([workload_config("smoke", 8, device=device)]) == places


def test_half_a_record_and_a_file_in_the_folder_s_place(tmp_path):
    first = run_cells(measure, cells(a=0), tmp_path)
    record = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(record | {"result": None}))
    assert run_cells(measure, cells(a=0), tmp_path)["a"]["result"]["pid"] != first["a"]["result"]["pid"]
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match="Cannot write"):
        run_cells(measure, cells(a=0), tmp_path / "taken")


def test_two_sweeps_do_not_measure_in_one_folder(tmp_path):
    with alone_in(tmp_path), pytest.raises(UserError, match="Another process is measuring in"):
        run_cells(measure, cells(a=0), tmp_path)
    run_cells(measure, cells(a=0), tmp_path)
    with alone_in(tmp_path):  # what is finished can be read all the same
        assert run_cells(measure, cells(a=0), tmp_path)["a"]["outcome"] == "complete"
