"""benchmarks/cpu.py, tokenizer.py and trees.py: contestants do the same work, and what is written holds together."""

import json
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest

from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig
from lmcore.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = TrainConfig(
    ModelConfig(vocab_size=60, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48),
    OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    batch_size=4,
)


def run(command, *arguments):
    words = [sys.executable, BENCHMARKS / command, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("cpu")


def test_all_contestants_take_the_same_steps(cpu):
    """Same weights, same batches: the same losses step after step, which is what makes their times comparable."""
    bench, losses = cpu.Bench(TINY, cpu.CPU, batches=cpu.BATCHES), {}
    for name in cpu.CONTESTANTS:
        if "compiled" not in name and (name != "Hugging Face" or util.find_spec("transformers")):
            contestant = bench.build(name)
            losses[name] = contestant.notes["losses"] + [contestant.run().item() for _ in range(2)]
    assert {"lmcore plain", "lmcore sdpa", "lmcore fused", "torch.nn"} <= set(losses)
    expected = losses.pop("lmcore plain")
    assert len(set(expected)) == 6
    for name, values in losses.items():
        assert values == pytest.approx(expected, rel=2e-4), name


def test_contestants_that_differ_or_are_not_installed(cpu, monkeypatch):
    """The first are not compared, the others are a row that says so."""

    def missing(source):
        raise ImportError("No module named 'transformers'")

    def other(source):
        model, logits = torch_llama(source)
        return model, lambda inputs: 2 * logits(inputs)

    torch_llama = import_module("peers").torch_llama
    monkeypatch.setattr(import_module("steps"), "PEERS", {"missing": missing, "another": other})
    monkeypatch.setattr(cpu, "CONTESTANTS", ("lmcore plain", "missing"))
    result = cpu.compare_training(TINY, 1, compiled=False, seconds_per_turn=0.01)
    assert result["contestants"]["missing"] == {"outcome": "absent", "reason": "No module named 'transformers'"}
    monkeypatch.setattr(cpu, "CONTESTANTS", ("lmcore plain", "another"))
    with pytest.raises(UserError, match="another and lmcore plain do not compute the same"):
        cpu.compare_training(TINY, 1, compiled=False, seconds_per_turn=0.01)


def test_the_command_writes_both_results(tmp_path):
    options = "--repeats 2 --sizes smoke --no-compiled --seconds-per-turn 0.01 --threads 1 --tokens 100000"
    done = run("cpu.py", *options.split(), "--out", tmp_path)
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


def test_the_tokenizers_are_compared_on_equal_results(tmp_path, shared_data, monkeypatch, capsys):
    """All three parts, on few documents."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    text = tmp_path / "text.txt"
    text.write_text((shared_data / "tinystories" / "valid.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    import_module("tokenizer").main(text, 300, 1, shared_data / "gpt2", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["training"]["merges"] == 300 - 257
    assert result["training"]["merges_in_common"] > 30
    assert set(result["encoding"]["tokens_per_second"]) == {"lmcore_bulk", "tiktoken", "lmcore_python"}
    assert set(result["taught_encoder"]["ratios"]) == {"first_pass", "warm", "letters", "doubling"}
    assert "times as long as tiktoken" in capsys.readouterr().out


def test_two_trees_take_turns(tmp_path):
    """Each in a process of its own; here both are this one."""
    out = tmp_path / "trees.json"
    options = ("--toy", "--rounds", "2", "--out", out, "--only", "attention-16-32")
    done = run("trees.py", BENCHMARKS.parent, *options)
    (case,) = json.loads(out.read_text())["cases"].values()
    assert case["ratio"] == pytest.approx(case["old_seconds"] / case["new_seconds"], rel=1)
    assert case["ratio_low"] <= case["ratio"] <= case["ratio_high"]
    assert done.stdout.startswith("attention-16-32: old ")
