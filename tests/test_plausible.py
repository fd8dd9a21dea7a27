"""Measurements that arithmetic forbids: the least bytes and FLOPs of a step, worked by hand.

The memory of a CUDA graph counts while it is captured: a peak that misses it is refused.
"""

from pathlib import Path

import pytest
import torch

from lmcore.accounting import num_parameters
from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig, model_config, replace
from lmcore.files import read_json
from lmcore.metrics import Meter
from lmcore.profiling import timing
from lmcore.profiling.cases import WorkloadConfig, workload_config
from lmcore.profiling.plausible import least_bytes, refusal, refusal_of

RESULTS = Path(__file__).parents[1] / "results" / "h200"

MODEL = ModelConfig(vocab_size=96, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=64)
CASE = WorkloadConfig(model=MODEL, batch_size=4, mode="train_step", precision="fp32", warmup_steps=1, steps=2)

PARAMETERS = 2 * 96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
STREAM, PAIRS, HIDDEN, LOGITS = 4 * 16 * 32, 4 * 2 * 16 * 16, 4 * 16 * 64, 4 * 16 * 96
SAVED = 5 * STREAM + 2 * (6 * STREAM + 2 * PAIRS + 4 * HIDDEN) + 2 * LOGITS
"""Values saved for the backward pass: five norms; in a block Q, K, V, weighted sum, output projection and W2's output,
scores and softmax; W1, SiLU, W3 and their product; logits twice."""

TOKEN_FLOPS = 2 * (8 * 32 * 32 + 4 * 16 * 32 + 6 * 32 * 64) + 2 * 32 * 96
FLOPS, MASKED = 4 * 16 * TOKEN_FLOPS, 4 * 16 * 2 * (4 * 16 * 32) // 2


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"mode": "forward"}, 4 * PARAMETERS),
        ({"mode": "forward_backward"}, 4 * (PARAMETERS + SAVED)),
        ({"mode": "forward_backward", "model__checkpoint_every": 1}, 2 * 4 * PARAMETERS),
        ({"mode": "forward_backward", "model__attention": "flash"}, 4 * (PARAMETERS + SAVED - 2 * 2 * PAIRS)),
        ({}, 4 * (3 * PARAMETERS + SAVED)),
        ({"precision": "bf16"}, 4 * 3 * PARAMETERS + 2 * SAVED),
        ({"precision": "fp16"}, 4 * PARAMETERS + 2 * SAVED),  # every update may have been skipped
        ({"optimizer": OptimizerConfig(name="muon")}, 4 * (2 * PARAMETERS + SAVED)),
        ({"warmup_steps": 0, "steps": 1}, 4 * (PARAMETERS + SAVED)),  # the first step has no moments yet
    ],
)
def test_a_peak_below_what_a_step_holds_is_refused(changes, least):
    case = replace(CASE, **changes)
    assert refusal(case, peak_bytes=least) is None
    assert "the measurement misses memory" in refusal(case, peak_bytes=least - 1)
    assert refusal_of(case, {"samples": [], "torch_peak_bytes": least - 1}) is not None


@pytest.mark.parametrize(
    ("changes", "flops", "peak"),
    [
        ({"mode": "forward"}, FLOPS, 67e12),
        ({"mode": "forward_backward"}, 3 * FLOPS, 67e12),
        ({"precision": "bf16"}, 3 * FLOPS, 989.4e12),
        ({"model__attention": "flash"}, 3 * (FLOPS - MASKED), 67e12),
        ({"ops": "fused", "precision": "bf16"}, 3 * (FLOPS - MASKED), 989.4e12),
    ],
)
def test_more_than_the_peak_rate_is_refused(changes, flops, peak):
    """The median of the measured steps counts, neither the warm-ups nor the fastest."""
    case, least = replace(CASE, **changes), flops / peak
    for seconds, refused in (1.001 * least, False), (0.999 * least, True):
        assert (refusal(case, seconds=seconds, device="NVIDIA H200") is not None) == refused
        assert refusal(case, seconds=seconds, device="a chip of unknown peak") is None
        steps = [(True, 0.0), (False, 0.0), (False, seconds), (False, 9.0)]
        samples = [{"wall": wall, "warmup": warmup} for warmup, wall in steps]
        assert (refusal_of(case, {"device": "NVIDIA H200", "samples": samples}) is not None) == refused


EXPLICIT = workload_config(
    "small", 1024, vocab_size=10_000, batch_size=4, mode="train_step", precision="bf16", ops="fused", attention="flash"
)


def test_the_least_of_an_explicit_step_by_hand():
    """Weights, gradients and moments, and of every token and layer q, k, v, attention's and the block's output and the
    two branches of the gated network in bfloat16."""
    parameters = 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 2 * 10_000 * 768 + 768
    assert num_parameters(EXPLICIT.model) == parameters
    saved = 4 * 1024 * 12 * (5 * 768 + 2 * 3072)
    assert least_bytes(EXPLICIT) == 16 * parameters + 2 * saved
    assert least_bytes(replace(EXPLICIT, mode="forward")) == 4 * parameters
    assert least_bytes(EXPLICIT, shared_by=4) == 12 * parameters // 4 + 2 * saved
    recomputed = replace(EXPLICIT, model__checkpoint_every=1)
    assert least_bytes(recomputed) == 16 * parameters  # what it saves depends on the way


TIMED = ("benchmark", "study", "wikitext_cost", "kernels_steps", "kernels_compiled")


def timed_cases():
    """The rows of the recorded timings, with the cases that they are of."""
    for name in TIMED:
        for row in read_json(RESULTS / f"{name}.json")["rows"]:
            sizes = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff", "checkpoint_every")
            model = {key: None if row[key] is None else int(row[key]) for key in sizes}
            ops, ways = row.get("ops", "plain"), {key: row[key] for key in ("mode", "precision")}
            if row["size"] == "study" and ops == "plain":
                model |= {"position": "sinusoidal", "ffn": "silu"}
            model = ModelConfig(**model, attention=row["attention"])
            case = WorkloadConfig(int(row["batch_size"]), ops=ops, model=model, compile=bool(row["compile"]), **ways)
            yield f"{name}: {row.get('case', row.get('variant'))}", case, row


def test_no_recorded_step_is_forbidden():
    """A graph's peak that was counted after its capture is: 2.68 GB of a model with 2.59 GB of state."""
    found = {
        name: refusal(case, row["peak_memory_bytes"], row["wall_median"], row["device"])
        for name, case, row in timed_cases()
        if row["outcome"] == "complete"
    }
    assert len(found) > 50
    assert {name: reason for name, reason in found.items() if reason} == {}


@pytest.mark.gpu
def test_a_captured_steps_peak_has_its_activations(tmp_path):
    """Held against what its tensors add up to."""
    before = torch.cuda.memory_allocated()
    result = timing.measure(replace(EXPLICIT, device="cuda", warmup_steps=2, steps=3), tmp_path)
    peak = result["peak_memory_bytes"] - before
    assert peak >= least_bytes(EXPLICIT) > 16 * num_parameters(EXPLICIT.model) + 2**29
    assert peak < 1.5 * least_bytes(EXPLICIT)


def test_lines_of_metrics_keep_the_graphs_peak(monkeypatch):
    peaks = iter([170, 100])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr("lmcore.metrics.device_name", lambda device: "a chip")
    meter = Meter(TrainConfig(model_config("smoke"), device="cuda"), torch.device("cuda"))
    assert [meter.line(step, [1.0], 0.0, 0.0)["peak_memory_bytes"] for step in (1, 2)] == [170, 170]
