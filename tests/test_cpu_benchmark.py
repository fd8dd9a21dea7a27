"""benchmarks/cpu.py: its contestants do the same work, and what it writes holds together."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig
from lmcore.errors import UserError
from lmcore.model import TransformerLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = TrainConfig(
    ModelConfig(vocab_size=60, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48),
    OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    batch_size=4,
)


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("cpu.training")


def test_all_contestants_take_the_same_steps(training):
    """Same weights, same batches: the same losses step after step, which is what makes their times comparable."""
    torch.manual_seed(0)
    source = TransformerLM(TINY.model)
    steps = {}
    for name, make in training.contestants(source, TINY).items():
        if "compiled" not in name:
            try:
                steps[name] = make()
            except ImportError:
                assert name == "Hugging Face"
    batches = training.random_batches(TINY)
    losses = {name: [step(*batch)[0].item() for batch in batches[:6]] for name, step in steps.items()}
    assert {"lmcore plain", "lmcore sdpa", "lmcore fused", "torch.nn"} <= set(losses)
    expected = losses.pop("lmcore plain")
    assert len(set(expected)) == 6
    for name, values in losses.items():
        assert values == pytest.approx(expected, rel=2e-4), name


def test_contestants_that_differ_are_not_compared(training, monkeypatch):
    torch_llama = training.PEERS["torch.nn"]

    def other(source):
        model, _ = torch_llama(source)
        return model, lambda inputs, targets: model(inputs).square().mean()

    monkeypatch.setattr(training, "PEERS", {"another": other})
    with pytest.raises(UserError, match="another and lmcore plain do not compute the same"):
        training.compare_training(TINY, 1, compiled=False, seconds_per_turn=0.01)


def test_a_contestant_that_is_not_installed_is_a_row(training, monkeypatch):
    def missing(source):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(training, "PEERS", training.PEERS | {"Hugging Face": missing})
    result = training.compare_training(TINY, 1, compiled=False, seconds_per_turn=0.01)
    assert result["contestants"]["Hugging Face"] == {"outcome": "absent", "reason": "No module named 'transformers'"}


def test_the_command_writes_both_results(tmp_path):
    words = ["--repeats", "2", "--sizes", "smoke", "--no-compiled", "--seconds-per-turn", "0.01", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "cpu.py", *words, "--tokens", "100000", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "training smoke: 0.17 M parameters, 16 × 128 tokens" in done.stdout
    (training,) = json.loads((tmp_path / "training_benchmark.json").read_text())["sizes"]
    plain = training["contestants"]["lmcore plain"]
    assert plain["tokens_per_second"] == pytest.approx(16 * 128 / plain["median"])
    assert len(plain["seconds_per_step"]) == 2
    assert plain["times_plain"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    loaders = json.loads((tmp_path / "loader_benchmark.json").read_text())
    assert loaders["environment"]["threads"] == 1
    for shape in loaders["shapes"]:
        assert all(row["batches_per_second"] > 0 for row in shape["contestants"].values())
        assert shape["contestants"]["lmcore"]["times_lmcore"]["median"] == 1.0
