"""The runner of benchmark cases: a process for each, outcomes as rows, nothing measured twice."""

import importlib
import json
import os
import shutil
import time

import pytest
import torch
from filelock import FileLock
from runner_task import SMALL, cases, measure

from lmcore.errors import UserError
from lmcore.profiling import runner
from lmcore.profiling.runner import OLD_TASKS, case_lock, measuring_gpus, require_complete, run_cases, task_name

SEEDS = {"a": 0, "oom": 1, "wrong": 2, "killed": 3, "left": 4, "b": 6}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Six cases of all outcomes, measured once: their folder and records."""
    folder = tmp_path_factory.mktemp("runner") / "cases"
    return folder, run_cases(measure, cases(**SEEDS), folder)


def test_every_case_has_its_own_process_and_an_outcome(first):
    folder, records = first
    assert {name: (record["outcome"], record["reason"]) for name, record in records.items()} == {
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
        "other_task": {"task": "lmcore.elsewhere:measure"},
        "half": {"result": None},
    }
    for name, change in changed.items():
        (folder / f"{name}.json").write_text(json.dumps(base | change))
    (folder / "damaged.json").write_text("{half")
    monkeypatch.setitem(OLD_TASKS, "lmcore.before:measure", task_name(measure))
    asked = dict.fromkeys((*changed, "damaged"), 0)
    read = run_cases(measure, cases(machine=0), folder, reuse_other_machine=True)
    assert read["machine"]["environment"]["device"] == "another GPU"
    with FileLock(folder / ".lock"):  # what is finished can be read all the same
        run_cases(measure, cases(a=0, oom=1), folder)
    capsys.readouterr()
    again = run_cases(measure, cases(a=0, oom=1, wrong=0, b=7, new=8, **asked), folder)  # wrong is tried again
    assert "3 of 10 cases reused" in capsys.readouterr().out
    assert list(again) == ["a", "oom", "wrong", "b", "new", *asked]
    assert all(again[name] == json.loads(json.dumps(records[name])) for name in ("a", "oom"))
    assert again["old_name"]["result"] == base["result"]
    measured = {name: record["result"]["pid"] for name, record in again.items() if record["result"]}
    assert [name for name, pid in measured.items() if pid == base["result"]["pid"]] == ["a", "old_name"]
    assert len(set(measured.values())) == 1 + 7
    assert measured["b"] != records["b"]["result"]["pid"]
    assert json.loads((folder / "wrong.json").read_text())["outcome"] == "complete"


RECORDED = [
    "report.memory.kept:kept_by_block", "profiling.timing:measure", "profiling.components:measure_components",
    "profiling.nsys.profile:profile_workload",
    "profiling.memory.profile:profile_memory", "profiling.memory.profile:profile_memory_without_snapshot",
    "profiling.kernels.measuring:measure_ceilings", "profiling.kernels.steps:measure_ungraphed",
    "profiling.kernels.agreement:measure_agreement", "profiling.kernels.interpreted:measure_interpreted",
    "profiling.kernels.attention:measure_attention", "profiling.kernels.loss:measure_loss",
    "profiling.kernels.optimizer:measure_optimizer", "profiling.kernels.elementwise:measure_elementwise",
    "profiling.kernels.decoding:measure_decoding",
]  # fmt: skip
"""Tasks of the records that notebooks and commands had written by 36acd2f."""


@pytest.mark.parametrize("name", RECORDED)
def test_records_from_before_a_task_was_moved_are_recognised(name):
    today = OLD_TASKS.get(f"lmcore.{name}", f"lmcore.{name}")
    module, _, function = today.partition(":")
    assert task_name(getattr(importlib.import_module(module), function)) == today
    assert runner.is_of({"task": f"lmcore.{name}", "config": {"seed": 3}}, today, runner.WorkloadConfig(seed=3))


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


REFUSED = {
    "a path": (measure, {"../a": SMALL}, "must be a file name"),
    "dots": (measure, {"..": SMALL}, "must be a file name"),
    "no module's": (lambda config, folder: {}, {"a": SMALL}, "function at the top of a module"),
    "no device": (measure, cases("cuda:7", a=0), "Device 'cuda:7' is not there"),
    "a file": (measure, cases(a=0), "Cannot write"),
    "folder in use": (measure, cases(a=0), "Another process is measuring in"),
    "case in use": (measure, cases(a=0), "Another process is measuring a in"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_before_anything_runs(name, tmp_path, monkeypatch):
    task, asked, words = REFUSED[name]
    monkeypatch.setattr(runner, "SECONDS_OF_A_LOOK", 0.1)
    folder = tmp_path / "out"
    if name == "a file":
        folder.write_text("a file")
    held = {"folder in use": folder / ".lock", "case in use": case_lock(folder, "a")}.get(name, tmp_path / "other")
    with FileLock(held), pytest.raises(UserError, match=words):
        run_cases(task, asked, folder)
    assert not list(tmp_path.rglob("*.json"))
    assert folder.exists() == (name in ("a file", "folder in use", "case in use"))


def test_a_precision_that_the_device_lacks(monkeypatch):
    def refuse(device, precision):
        raise RuntimeError("not implemented for 'Half'\nat a place")

    monkeypatch.setattr("lmcore.device.autocast", refuse)
    sentence = "cpu does not compute in fp16 (not implemented for 'Half'); choose another --precision or --device."
    assert runner.examine([("cpu", "fp16")])[1] == {("cpu", "fp16"): sentence}
