"""Trackers: every metrics line, one run however often it is resumed, and training that outlives them."""

import json
import struct
import sys

import pytest

from lmcore.config import replace
from lmcore.metrics import AsyncMetrics
from lmcore.run import RunFolder
from lmcore.tracker import TRACKERS
from lmcore.train import train

Sent = list[tuple[int, float]]
"""Step and training loss of each line that a tracker holds."""


def sent_to_tensorboard(run: RunFolder) -> Sent:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    return [(event.step, event.value) for event in events.Reload().Scalars("train_loss")]


def sent_to_trackio(run: RunFolder) -> Sent:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    (name,) = storage.get_runs("lmcore")
    return [(line["step"], line["train_loss"]) for line in storage.get_logs("lmcore", name)]


def sent_to_wandb(run: RunFolder) -> Sent:
    """Of the offline files, one for each start: a header, then records of checksum, length, type and content."""
    protocol, sent = pytest.importorskip("wandb.proto.wandb_internal_pb2"), []
    sys.modules["wandb"].teardown()  # until W&B's own process has written them
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        content, at = path.read_bytes(), 7
        while at < len(content):
            (length,) = struct.unpack_from("<H", content, at + 4)
            record, at = protocol.Record.FromString(content[at + 7 : at + 7 + length]), at + 7 + length
            if items := {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}:
                sent.append((items["_step"], items["train_loss"]))
    assert len({path.name for path in run.path.glob("wandb/*/*.wandb")}) == 1, "the name ends with the run's id"
    return sent


READERS = {"wandb": sent_to_wandb, "tensorboard": sent_to_tensorboard, "trackio": sent_to_trackio}


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_every_line_of_a_run_that_resumes_before_its_last_one(name, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name, reason=f"needs the extra {name}")
    config, run = replace(tiny_run, tracker=name, checkpoint_interval=3), RunFolder(tmp_path / "run")
    push = AsyncMetrics.push

    def failing(self, step, *values):
        push(self, step, *values)
        if step == 5:
            raise RuntimeError("killed")

    monkeypatch.setattr(AsyncMetrics, "push", failing)
    with pytest.raises(RuntimeError, match="killed"):
        train(config, run)
    monkeypatch.setattr(AsyncMetrics, "push", push)
    assert [line["step"] for line in run.metrics_lines()] == [1, 2, 3, 4]
    assert train(config, run).state == "complete"
    sent = READERS[name](run)
    assert sorted(set(sent)) == [(line["step"], pytest.approx(line["train_loss"])) for line in run.metrics_lines()]
    assert len(sent) == (6 if name == "tensorboard" else 7), "step 4 was trained twice"


class Failing:
    """A tracker that fails at its second line."""

    def __init__(self, *_):
        self.lines = []

    def log(self, metrics, step):
        self.lines.append(step)
        if step == 2:
            raise OSError("no network")

    def finish(self):
        raise AssertionError("it gets nothing more")


def test_a_failure_is_one_warning_and_the_run_goes_on(tiny_run, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: opened.append(Failing()) or opened[-1])
    assert train(replace(tiny_run, tracker="wandb"), tmp_path / "a").state == "complete"
    assert opened[0].lines == [1, 2]
    said = capsys.readouterr().out
    assert said.count("wandb") == 1
    assert "a: wandb gets nothing more (no network); metrics.jsonl has all metrics." in said


def test_a_package_that_is_not_installed_is_named(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert train(replace(tiny_run, tracker="trackio"), tmp_path / "a").state == "complete"
    assert "pip install 'lmcore[trackio]'" in capsys.readouterr().out
