"""What notebook 07 counts and measures: calls in turns, bytes that move, parity with the reference."""

from types import SimpleNamespace

import pytest
import torch

from lmcore import recipes
from lmcore.config import TrainConfig, model_config, replace
from lmcore.profiling.kernels import cases, optimizer
from lmcore.profiling.kernels.bytes_moved import moved_by
from lmcore.profiling.kernels.measuring import call_bytes, in_turns, relative_error
from lmcore.profiling.timing import Timer
from lmcore.profiling.workload import workload_config

CPU = torch.device("cpu")


def test_events_are_recorded_where_the_work_is(monkeypatch):
    """With cuda:1 the current stream is still that of cuda:0, where nothing happens."""
    recorded = []
    event = SimpleNamespace(record=recorded.append, elapsed_time=lambda end: 6.0)
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: f"stream of {device}")
    timer = Timer(CPU)
    timer.device, timer.cuda = torch.device("cuda", 1), True
    assert timer.once(lambda: recorded.append("work"), 0, lambda: recorded.append("reset"))[0] == 6e-3
    assert recorded == ["reset", "stream of cuda:1", "work", "stream of cuda:1"]


def test_calls_take_turns_each_after_its_reset():
    calls = []
    contestants = {"a": (lambda: calls.append("a"), None), "b": (lambda: calls.append("b"), lambda: calls.append("-"))}
    seconds = in_turns(contestants, Timer(CPU), 0.01)
    assert len(seconds["a"]) == len(seconds["b"]) >= 7
    timed = "".join(calls)[-3 * len(seconds["a"]) :]
    assert timed[:6] in ("a-b-ba", "-baa-b")  # each round in the other order
    in_turns(contestants, Timer(CPU), 0.01, alone=False)
    assert "bb" not in "".join(calls)


def test_an_error_that_is_not_finite_is_infinite():
    wanted = torch.ones(3)
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), wanted) == float("inf")
    assert relative_error(2 * wanted, wanted) == pytest.approx(1.0)
    assert (relative_error(0 * wanted, 0 * wanted), relative_error(0 * wanted, wanted)) == (0, 1)


def test_operations_are_counted_once_for_each_tensor():
    a, b = (torch.empty(10, 10, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16))
    moved = moved_by(lambda: (a + a, a.t(), b.float(), a.mul_(2), torch.empty_like(a), a.zero_(), a.copy_(b)))
    assert moved.operations == [
        ("add", 400, 400), ("_to_copy", 200, 400), ("mul_", 400, 400), ("zero_", 0, 400), ("copy_", 200, 400)
    ]  # fmt: skip
    assert moved.total == 400 + 400 + 200 + 400 + 400 + 400 + 400 + 200 + 400
    assert moved_by(lambda: a[:1].expand(50, 10) + a[:1]).operations == [("add", 2 * 40, 50 * 40)]


def test_the_plain_update_moves_what_the_handouts_algorithm_says():
    lines = [" ".join(line.split()) for line in optimizer.update_moved().lines(optimizer.COUNTED, "parameter")]
    assert "addcmul_ 1 × read 8.00 written 4.00 bytes per parameter" in lines
    assert lines[-1] == "together 92.00 bytes per parameter"


def test_eager_attention_moves_the_score_matrix_many_times():
    model = model_config("small", context_length=512, vocab_size=10)
    layer, pairs = cases.attention_layer(model, 2, torch.float32), 512 * 513 // 2
    forward = layer.forward.moved().total
    assert layer.moved().total > 2 * forward > 2 * 40 * (2 * model.num_heads * 512**2)
    assert (layer.least_bytes, layer.flops) == (4 * 2 * 512 * 768 * 4, 2 * 2 * 2 * model.d_model * pairs)


def test_the_memory_of_a_call_is_counted():
    x = torch.zeros(1000, 1000)
    assert all(4_000_000 <= size < 4_000_100 for size in call_bytes(lambda: x + 1, CPU))  # and scalars
    most, held = call_bytes(lambda: ((x + 1) + (x + 2)).sum(), CPU)
    assert most >= 8_000_000 > 100 > held
    assert call_bytes(lambda: x.t(), CPU) == (0, 0)


def test_attention_by_size():
    case = workload_config("smoke", 256, batch_size=2, num_heads=1, d_model=32, steps=3)
    rows = cases.measure_attention_sizes(case, None)["rows"]
    assert [(row["context"], row["head_size"]) for row in rows] == [(128, 16), (256, 16), (128, 32), (256, 32)]
    scores = 2 * 256 * 256 * 4  # exponentials and probabilities are held, with a mask of one byte; the scores are not
    assert 2 * scores < rows[1]["saved_bytes"] < 2.2 * scores


@pytest.mark.parametrize("number", range(3))
def test_both_ways_of_an_elementwise_operation_do_the_same(number):
    case = cases.elementwise(workload_config("smoke", 16, batch_size=2), CPU)[number]
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
    samples = cases.measure_ungraphed(workload_config("smoke", 16, batch_size=2, vocab_size=32, **changes), None)
    assert [sample["warmup"] for sample in samples["samples"]] == [True, False, False]
    assert all(sample["wall"] > 0 for sample in samples["samples"])
