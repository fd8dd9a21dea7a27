"""What notebook 07 and benchmarks/ share: kernels beside their references, memory of a call."""

import pytest
import torch

from lmcore import recipes
from lmcore.config import TrainConfig, replace
from lmcore.profiling import kernels
from lmcore.profiling.cases import workload_config
from lmcore.profiling.kernels import call_bytes, relative_error

CPU = torch.device("cpu")


def test_an_error_that_is_not_finite_is_infinite():
    wanted = torch.ones(3)
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), wanted) == float("inf")
    assert relative_error(2 * wanted, wanted) == pytest.approx(1.0)
    assert (relative_error(0 * wanted, 0 * wanted), relative_error(0 * wanted, wanted)) == (0, 1)


def test_the_memory_of_a_call_is_counted():
    x = torch.zeros(1000, 1000)
    assert all(4_000_000 <= size < 4_000_100 for size in call_bytes(lambda: x + 1, CPU))  # and scalars
    most, held = call_bytes(lambda: ((x + 1) + (x + 2)).sum(), CPU)
    assert most >= 8_000_000 > 100 > held
    assert call_bytes(lambda: x.t(), CPU) == (0, 0)


def test_attention_by_size():
    case = workload_config("smoke", 256, batch_size=2, num_heads=1, d_model=32, steps=3)
    rows = kernels.measure_attention_sizes(case, None)["rows"]
    assert [(row["context"], row["head_size"]) for row in rows] == [(128, 16), (256, 16), (128, 32), (256, 32)]
    scores = 2 * 256 * 256 * 4  # exponentials and probabilities are held, with a mask of one byte; the scores are not
    assert 2 * scores < rows[1]["saved_bytes"] < 2.2 * scores


def test_a_pass_that_runs_out_of_memory_leaves_what_was_measured_before_it(monkeypatch):
    grad = torch.autograd.grad

    def backward(outputs, inputs, *arguments, **options):
        if inputs[0].shape[-2:] == (256, 16):
            raise torch.OutOfMemoryError("no room")
        return grad(outputs, inputs, *arguments, **options)

    monkeypatch.setattr("torch.autograd.grad", backward)
    case = workload_config("smoke", 256, batch_size=2, num_heads=1, d_model=16, steps=3)
    rows = kernels.measure_attention_sizes(case, None)["rows"]
    assert [row["outcome"] for row in rows] == ["complete", "out of memory"]
    assert "backward" in rows[0]
    assert rows[1]["forward"] > 0
    assert not {"both", "backward"} & {*rows[1]}


def test_the_least_work_of_attention_and_the_two_ways_of_every_case():
    layer = kernels.attention((2, 12, 512, 64), torch.float32, "meta")
    assert (layer.least_bytes, layer.flops) == (4 * 2 * 512 * 768 * 4, 2 * 2 * 2 * 768 * 512 * 513 // 2)
    cases = [kernels.attention((1, 2, 20, 16), torch.float32, CPU), kernels.loss(10, 16, 50, torch.float32, CPU)]
    for case in [*cases, *kernels.elementwise(workload_config("smoke", 16, batch_size=2), CPU)]:
        for _ in range(2 if case.reset else 1):  # what works in place finds its inputs again
            if case.reset:
                case.reset()
            for ours, theirs in zip(case.ours(), case.run(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_fast_path_differs_in_nothing_but_how_it_computes():
    plain = TrainConfig(ops="plain", compile=False)
    assert replace(recipes.fast(plain), ops="plain", model__attention="plain") == plain


def test_the_explicit_step_is_measured_without_a_graph():
    changes = {"mode": "train_step", "ops": "fused", "attention": "flash", "warmup_steps": 1, "steps": 2}
    samples = kernels.measure_ungraphed(workload_config("smoke", 16, batch_size=2, vocab_size=32, **changes), None)
    assert [sample["warmup"] for sample in samples["samples"]] == [True, False, False]
    assert all(sample["wall"] > 0 for sample in samples["samples"])
