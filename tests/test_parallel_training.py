"""`lmcore train --parallel`: equal to one process, on any number of ranks, and resumed from either kind of checkpoint."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from parallel_runs import Trainers, small_config

from lmcore.checkpoint import read_checkpoint, read_weights
from lmcore.config import CorpusConfig, replace
from lmcore.data import open_or_prepare
from lmcore.errors import UserError
from lmcore.run import RunFolder
from lmcore.train import train

WAYS = ("ddp", "zero1", "fsdp", "torch-ddp", "torch-fsdp2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel") / "data"
    open_or_prepare("embedded", "bpe:300", folder, CorpusConfig(num_documents=100))
    return folder


@pytest.fixture(scope="module")
def trainers():
    pool = Trainers()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The same run by one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(small_config(data), folder).state == "complete"
    return RunFolder(folder)


def complete(ended, steps=12) -> None:
    assert [(e.code, e.sentence) for e in ended] == [(0, "")] * len(ended), ended
    assert {e.result.state for e in ended} == {"complete"}
    assert {e.result for e in ended} == {ended[0].result} and ended[0].result.step == steps


def same_run(run: RunFolder, other: RunFolder, rtol=2e-5) -> None:
    """Equal lines of metrics and equal weights, up to the order of sums."""
    for line, expected in zip(run.metrics_lines(), other.metrics_lines(), strict=True):
        assert line["step"] == expected["step"] and line["tokens"] == expected["tokens"]
        for key in ("train_loss", "valid_loss", "grad_norm", "valid_accuracy"):
            if expected.get(key) is not None:
                assert line[key] == pytest.approx(expected[key], rel=rtol), key
    for path, expected_path in ((run.last_weights, other.last_weights), (run.best_weights, other.best_weights)):
        weights, expected = read_weights(path)[0], read_weights(expected_path)[0]
        assert weights.keys() == expected.keys()
        for name in weights:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("way", "ranks"), [*((way, 2) for way in WAYS), ("zero1", 3), ("fsdp", 4), ("torch-fsdp2", 3)])
def test_it_trains_what_one_process_trains(trainers, data, alone, tmp_path, way, ranks):
    complete(trainers.train(small_config(data, parallel=way), tmp_path / "run", ranks))
    same_run(RunFolder(tmp_path / "run"), alone)


def back_to(run: RunFolder, step: int) -> None:
    """The run as it was when it was killed after the checkpoint of a step."""
    for path in run.checkpoints():
        if int(path.stem.split("_")[1]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run.status_file.unlink()
    run.last_weights.unlink()


CHANGES = [
    # written by, in this form, on so many ranks; read by, on so many
    ("zero1", "sharded", 3, "fsdp", 2),
    ("fsdp", "sharded", 3, "torch-fsdp2", 2),
    ("torch-fsdp2", "async", 2, "zero1", 3),
    ("ddp", "whole", 2, "fsdp", 4),
    ("fsdp", "whole", 2, "none", 1),
    ("fsdp", "async", 4, "none", 1),
    ("none", "sharded", 1, "torch-ddp", 2),
    ("torch-fsdp2", "whole", 3, "ddp", 2),
    ("zero1", "async", 2, "zero1", 2),
]


@pytest.mark.parametrize(("writer", "form", "ranks", "reader", "others"), CHANGES)
def test_a_checkpoint_goes_on_with_another_way_and_number(
    trainers, data, alone, tmp_path, writer, form, ranks, reader, others
):
    run = RunFolder(tmp_path / "run")
    config = small_config(data, parallel=writer, checkpoints=form)
    if writer == "none":
        assert train(config, run).state == "complete"
    else:
        complete(trainers.train(config, run.path, ranks))
    assert [path.suffix for path in run.checkpoints()] == [".pt" if form == "whole" else ".sharded"] * 3
    back_to(run, 8)
    assert not list(run.checkpoint_folder.glob(".*"))
    config = replace(config, parallel=reader)
    if reader == "none":
        assert train(config, run).state == "complete"
    else:
        ended = trainers.train(config, run.path, others)
        complete(ended)
        assert ["goes on from step 8" in e.printed for e in ended] == [True] + [False] * (others - 1)
    same_run(run, alone)
