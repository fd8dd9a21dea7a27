"""The runner of benchmark cases: a process for each, outcomes as rows, nothing measured twice."""

import importlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from runner_task import IMPOSSIBLE, SMALL, cases, measure

from lmcore.errors import UserError
from lmcore.profiling import runner
from lmcore.profiling.runner import OLD_TASKS, case_lock, measuring_gpus, require_complete, run_cases, task_name

SEEDS = {"a": 0, "oom": 1, "wrong": 2, "killed": 3, "left": 4, "b": 6, "impossible": IMPOSSIBLE}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Cases of all outcomes, measured once: their folder and records."""
    folder = tmp_path_factory.mktemp("runner") / "cases"
    return folder, run_cases(measure, cases(**SEEDS), folder)


def test_every_case_has_its_own_process_and_an_outcome(first):
    folder, records = first
    found = {name: (record["outcome"], record["reason"]) for name, record in records.items()}
    outcome, reason = found.pop("impossible")
    assert outcome == "failed"
    assert "its peak was measured as 0.00 GB: the measurement misses memory" in reason
    assert found == {
        "a": ("complete", None),
        "oom": ("out of memory", "Tried to allocate 7 GiB."),
        "wrong": ("failed", "ValueError: a fault in the program"),
        "killed": ("out of memory", runner.KILLED),
        "left": ("failed", "The process ended with exit code 9 and said nothing."),
        "b": ("complete", None),
    }
    assert "SIGKILL" in records["killed"]["reason"]
    assert len({os.getpid(), *(records[name]["result"]["pid"] for name in "ab")}) == 3
    assert records["a"]["result"]["shape"] == [1, 8, 32]
    assert records["oom"]["result"] is None
    assert (folder / "a" / "note.txt").exists()
    assert records["a"]["environment"]["torch"] == torch.__version__
    with pytest.raises(UserError, match="case wrong failed: ValueError"):
        require_complete(records)
    require_complete({name: records[name] for name in ("oom", "a")})


def test_finished_cases_of_the_same_code_and_device_are_not_measured_again(first, tmp_path, monkeypatch, capsys):
    folder, records = shutil.copytree(first[0], tmp_path / "copy"), first[1]
    base = records["a"]
    changed = {
        "old_name": {"task": "lmcore.before:measure"},
        "machine": {"environment": base["environment"] | {"device": "another GPU"}},
        "pytorch": {"environment": base["environment"] | {"torch": "1.0"}},
        "failed": {"outcome": "failed", "reason": "It was ended.", "result": None},
        "impossible": {"result": base["result"] | {"peak_memory_bytes": 1}},
        "other_task": {"task": "lmcore.elsewhere:measure"},
        "half": {"result": None},
    }
    for name, change in changed.items():
        (folder / f"{name}.json").write_text(json.dumps(base | change))
    (folder / "damaged.json").write_text("{half")
    monkeypatch.setitem(OLD_TASKS, "lmcore.before:measure", task_name(measure))
    read = run_cases(measure, cases(machine=0), folder, reuse_other_machine=True)
    assert read["machine"]["environment"]["device"] == "another GPU"
    with FileLock(folder / ".lock"):  # what is finished can be read all the same
        run_cases(measure, cases(a=0, oom=1), folder)
    capsys.readouterr()
    asked = {"a": 0, "oom": 1, "wrong": 0, "b": 7, "new": 8} | dict.fromkeys((*changed, "damaged"), 0)
    again = run_cases(measure, cases(**asked), folder)  # wrong is tried again, b has another seed
    assert "3 of 13 cases reused" in capsys.readouterr().out
    assert list(again) == list(asked)
    assert all(again[name] == json.loads(json.dumps(records[name])) for name in ("a", "oom"))
    before = {records[name]["result"]["pid"] for name in "ab"}
    measured = {name: record["result"]["pid"] for name, record in again.items() if record["result"]}
    assert [name for name, pid in measured.items() if pid in before] == ["a", "old_name"]
    assert len(set(measured.values())) == 1 + 10
    assert json.loads((folder / "wrong.json").read_text())["outcome"] == "complete"


RECORDED = """
report.memory.kept:kept_by_block timing:measure components:measure_components nsys.profile:profile_workload
memory.profile:profile_memory memory.profile:profile_memory_without_snapshot
kernels.measuring:measure_ceilings kernels.steps:measure_ungraphed kernels.agreement:measure_agreement
kernels.interpreted:measure_interpreted kernels.attention:measure_attention kernels.loss:measure_loss
kernels.optimizer:measure_optimizer kernels.elementwise:measure_elementwise kernels.decoding:measure_decoding
"""
"""Tasks of the records that notebooks and commands had written by 36acd2f; without report, they were in profiling."""


@pytest.mark.parametrize("name", RECORDED.split())
def test_records_from_before_a_task_was_moved_are_recognised(name):
    name = f"lmcore.{name}" if name.startswith("report") else f"lmcore.profiling.{name}"
    today = OLD_TASKS.get(name, name)
    module, _, function = today.partition(":")
    assert task_name(getattr(importlib.import_module(module), function)) == today
    assert runner.is_of({"task": name, "config": {"seed": 3}}, today, runner.WorkloadConfig(seed=3))


def test_records_with_the_keys_of_before_are_read(first):
    record = json.loads((first[0] / "a.json").read_text())
    old = json.dumps(record).replace('"case":', '"cell":').replace('"mode":', '"passes":')
    file = first[0] / "before.json"
    file.write_text(old)
    assert "passes" in json.loads(old)["config"]
    assert runner.read_record(file) == record
    file.unlink()


def test_what_hangs_is_ended():
    began = time.monotonic()
    assert runner.run_apart(time.sleep, (60,), 1.0) == ("failed", "It was ended after 1 s without a result.")
    assert time.monotonic() - began < 40


def test_several_gpus_measure_side_by_side_each_seen_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["3", "GPU-b"])
    for device, places in (("auto", ["3", "GPU-b"]), ("cuda", ["3", "GPU-b"]), ("cpu", [None]), ("cuda:1", [None])):
        assert measuring_gpus(cases(device, a=0).values()) == places  # those of a named device one at a time
    found = run_cases(measure, cases("auto", a=0, b=0, c=0, d=0), tmp_path)
    assert list(found) == ["a", "b", "c", "d"]
    assert {record["result"]["gpu"] for record in found.values()} == {"3", "GPU-b"}


@pytest.mark.parametrize(
    ("task", "asked", "held", "words"),
    [
        (measure, {"../a": SMALL}, None, "must be a file name"),
        (measure, {"..": SMALL}, None, "must be a file name"),
        (lambda config, folder: {}, cases(a=0), None, "function at the top of a module"),
        (measure, cases("cuda:7", a=0), None, "Device 'cuda:7' is not there"),
        (measure, cases(a=0), "out", "Cannot write"),  # the folder's name is that of a file
        (measure, cases(a=0), "out/.lock", "Another process is measuring in"),
        (measure, cases(a=0), f"out/{case_lock(Path(), 'a')}", "Another process is measuring a in"),
    ],
)
def test_refused_before_anything_runs(task, asked, held, words, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_OF_A_LOOK", 0.1)
    with FileLock(tmp_path / (held or "other")), pytest.raises(UserError, match=words):
        run_cases(task, asked, tmp_path / "out")
    assert not list(tmp_path.rglob("*.json"))
    assert (tmp_path / "out").exists() == (held is not None)


def test_a_precision_that_the_device_lacks(monkeypatch):
    def refuse(device, precision):
        raise RuntimeError("not implemented for 'Half'\nat a place")

    monkeypatch.setattr("lmcore.device.autocast", refuse)
    sentence = "cpu does not compute in fp16 (not implemented for 'Half'); choose another --precision or --device."
    assert runner.examine([("cpu", "fp16")])[1] == {("cpu", "fp16"): sentence}
