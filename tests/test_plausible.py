"""Measurements that arithmetic forbids: the least bytes and FLOPs of a step, worked by hand."""

import pytest

from lmcore.config import ModelConfig, OptimizerConfig, replace
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.plausible import refusal, refusal_of

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
        ({"optimizer": OptimizerConfig(name="sgd")}, 4 * (PARAMETERS + SAVED)),
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
