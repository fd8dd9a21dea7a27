"""The runner of benchmark cases: a process for each, outcomes as rows, nothing measured twice."""

import json
import os
import shutil
import time

import pytest
import torch
from filelock import FileLock
from runner_task import IMPOSSIBLE, SMALL, cases, measure

from lmcore.errors import UserError
from lmcore.profiling import runner
from lmcore.profiling.runner import require_complete, run_cases

SEEDS = {"a": 0, "oom": 1, "wrong": 2, "killed": 3, "left": 4, "b": 6, "impossible": IMPOSSIBLE}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Cases of all outcomes, measured once: their folder and records."""
    folder = tmp_path_factory.mktemp("runner") / "cases"
    return folder, run_cases(measure, cases(**SEEDS), folder)


def test_every_case_has_its_own_process_and_an_outcome(first):
    folder, records = first
    expected = {
        "a": ("complete", "None"), "b": ("complete", "None"), "oom": ("out of memory", "Tried to allocate 7 GiB."),
        "wrong": ("failed", "ValueError: a fault in the program"), "killed": ("out of memory", "SIGKILL"),
        "left": ("failed", "The process ended with exit code 9 and said nothing."),
        "impossible": ("failed", "its peak was measured as 0.00 GB: the measurement misses memory"),
    }  # fmt: skip
    assert {name: record["outcome"] for name, record in records.items()} == {n: e[0] for n, e in expected.items()}
    assert all(words in str(records[name]["reason"]) for name, (_, words) in expected.items())
    assert len({os.getpid(), *(records[name]["result"]["pid"] for name in "ab")}) == 3
    assert records["a"]["result"]["shape"] == [1, 8, 32]
    assert records["oom"]["result"] is None
    assert (folder / "a" / "note.txt").exists()
    assert records["a"]["environment"]["torch"] == torch.__version__
    with pytest.raises(UserError, match="case wrong failed: ValueError"):
        require_complete(records)
    require_complete({name: records[name] for name in ("oom", "a")})


def test_finished_cases_of_the_same_code_and_device_are_not_measured_again(first, tmp_path, capsys):
    folder, records = shutil.copytree(first[0], tmp_path / "copy"), first[1]
    base = records["a"]
    changed = {
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
    with FileLock(folder / ".lock"):  # what is finished can be read all the same
        run_cases(measure, cases(a=0, oom=1), folder)
    capsys.readouterr()
    asked = {"a": 0, "oom": 1, "wrong": 0, "b": 7, "new": 8} | dict.fromkeys((*changed, "damaged"), 0)
    again = run_cases(measure, cases(**asked), folder)  # wrong is tried again, b has another seed
    assert "2 of 12 cases reused" in capsys.readouterr().out
    assert list(again) == list(asked)
    assert all(again[name] == json.loads(json.dumps(records[name])) for name in ("a", "oom"))
    before = {records[name]["result"]["pid"] for name in "ab"}
    measured = {name: record["result"]["pid"] for name, record in again.items() if record["result"]}
    assert [name for name, pid in measured.items() if pid in before] == ["a"]
    assert len(set(measured.values())) == 1 + 10
    assert json.loads((folder / "wrong.json").read_text())["outcome"] == "complete"


def test_what_hangs_is_ended():
    began = time.monotonic()
    assert runner.run_apart(time.sleep, (60,), 1.0) == ("failed", "It was ended after 1 s without a result.")
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("task", "asked", "held", "words"),
    [
        (measure, {"../a": SMALL}, None, "must be a file name"),
        (lambda config, folder: {}, cases(a=0), None, "function at the top of a module"),
        (measure, cases("cuda:7", a=0), None, "Device 'cuda:7' is not there"),
        (measure, cases(a=0), "out", "cannot be written to"),  # the folder's name is that of a file
        (measure, cases(a=0), "out/.lock", "Another process is measuring in"),
    ],
)
def test_refused_before_anything_runs(task, asked, held, words, tmp_path):
    with FileLock(tmp_path / (held or "other")), pytest.raises(UserError, match=words):
        run_cases(task, asked, tmp_path / "out")
    assert not list(tmp_path.rglob("*.json"))
    assert (tmp_path / "out").exists() == (held is not None)


def test_a_precision_that_the_device_lacks(monkeypatch):
    def refuse(device, precision):
        raise RuntimeError("not implemented for 'Half'\nat a place")

    monkeypatch.setattr("lmcore.device.autocast", refuse)
    with pytest.raises(UserError, match=r"cpu does not compute in fp16 \(not implemented for 'Half'\); choose another"):
        runner.examine([("cpu", "fp16")])
