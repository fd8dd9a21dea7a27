"""What notebook 07 counts and measures: contestants in turns, bytes that move, parity with the reference."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from lmcore import recipes
from lmcore.config import TrainConfig, model_config, to_dict
from lmcore.errors import UserError
from lmcore.profiling.kernels import cases, optimizer
from lmcore.profiling.kernels.bytes_moved import moved_by
from lmcore.profiling.kernels.measuring import Absent, Contestant, extra_bytes, race, relative_error
from lmcore.profiling.timing import Timer
from lmcore.profiling.workload import workload_config

CPU = torch.device("cpu")


# contestants in turns


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


ENDS = {
    "gone": (Absent("not here"), "absent", "not here"),
    "refused": (UserError("not covered"), "absent", "not covered"),
    "big": (torch.OutOfMemoryError("too big"), "out of memory", "too big"),
    "wrong": (ValueError("wrong"), "failed", "ValueError: wrong"),
}


def test_contestants_take_turns_and_every_end_is_a_result():
    calls = []

    def raising(error):
        raise error

    def contestant(name, *values):
        return lambda: Contestant(lambda: calls.append(name), results=[torch.tensor(values)])

    builders = {"a": contestant("a", 1.0, 2.0), "b": contestant("b", 1.0, 2.2)}
    builders |= {name: lambda error=error: raising(error) for name, (error, *_) in ENDS.items()}
    results = race(builders, CPU, 0.01, reference=[torch.tensor([1.0, 2.0])])
    ends = dict.fromkeys("ab", ("complete", None)) | {name: tuple(end) for name, (_, *end) in ENDS.items()}
    assert {name: (result.outcome, result.reason) for name, result in results.items()} == ends
    assert results["a"].notes["relative_error"] == 0
    assert results["b"].notes["relative_error"] == pytest.approx(0.2 / 5**0.5, rel=1e-5)
    assert len(results["a"].seconds) == len(results["b"].seconds) >= 7
    timed = calls[-2 * len(results["a"].seconds) :]  # each round in the other order
    assert timed[:4] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])


def test_a_contestant_that_fails_later_has_no_time():
    calls = iter(range(6))  # is built and warms up
    ended = race({"later": lambda: Contestant(lambda: next(calls))}, CPU, 0.01)["later"]
    assert (ended.outcome, ended.seconds) == ("failed", [])


def test_a_reset_comes_before_every_timed_call():
    calls = []
    race({"a": lambda: Contestant(lambda: calls.append(1), lambda: calls.append(0))}, CPU, 0.01, alone=False)
    assert calls == [0, 1] * (len(calls) // 2)


def test_an_error_that_is_not_finite_is_infinite():
    wanted = torch.ones(3)
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), wanted) == float("inf")
    assert relative_error(2 * wanted, wanted) == pytest.approx(1.0)
    assert (relative_error(0 * wanted, 0 * wanted), relative_error(0 * wanted, wanted)) == (0, 1)


# bytes and tasks


def test_operations_are_counted_once_for_each_tensor():
    a, b = (torch.empty(10, 10, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16))
    moved = moved_by(lambda: (a + a, a.t(), b.float(), a.mul_(2), torch.empty_like(a), a.zero_(), a.copy_(b)))
    assert moved.operations == [
        ("add", 400, 400), ("_to_copy", 200, 400), ("mul_", 400, 400), ("zero_", 0, 400), ("copy_", 200, 400)
    ]  # fmt: skip
    assert moved.total == 400 + 400 + 200 + 400 + 400 + 400 + 400 + 200 + 400
    assert moved_by(lambda: a[:1].expand(50, 10) + a[:1]).operations == [("add", 2 * 40, 50 * 40)]


def test_the_plain_update_moves_what_the_handouts_algorithm_says():
    *lines, together = (
        " ".join(line.split()) for line in optimizer.update_moved().lines(optimizer.COUNTED, "parameter")
    )
    assert "addcmul_ 1 × read 8.00 written 4.00 bytes per parameter" in lines
    assert "linalg_vector_norm 2 × read 4.00 written 0.00 bytes per parameter" in lines
    assert together == "together 92.00 bytes per parameter"


def test_eager_attention_moves_the_score_matrix_many_times():
    model = model_config("small", context_length=512, vocab_size=10)
    scores = 2 * model.num_heads * 512**2
    layer = cases.attention_layer(model, 2, torch.float32)
    forward = layer.forward.moved().total
    assert layer.moved().total > 2 * forward > 2 * 40 * scores
    assert layer.least_bytes == 4 * 2 * 512 * 768 * 4


def test_the_memory_of_a_call_is_counted():
    x = torch.zeros(1000, 1000)
    assert 4_000_000 <= extra_bytes(lambda: x + 1, CPU) < 4_000_100  # and scalars
    assert extra_bytes(lambda: ((x + 1) + (x + 2)).sum(), CPU) >= 8_000_000
    assert extra_bytes(lambda: x.t(), CPU) == 0


def test_attention_by_size_leaves_nothing_behind(monkeypatch):
    saved, keep = [], cases.keep

    def kept(sizes, tensor):
        saved.append(weakref.ref(found := keep(sizes, tensor)))
        return found

    monkeypatch.setattr(cases, "keep", kept)
    case = workload_config("smoke", 256, batch_size=2, num_heads=1, d_model=32, steps=3)
    rows = cases.measure_attention_sizes(case, None)["rows"]
    assert [(row["context"], row["head_size"]) for row in rows] == [(128, 16), (256, 16), (128, 32), (256, 32)]
    scores = 2 * 256 * 256 * 4  # exponentials and probabilities are held, with a mask of one byte; the scores are not
    assert 2 * scores < rows[1]["saved_bytes"] < 2.2 * scores
    gc.collect()
    assert len(saved) >= 4 * 4
    assert not [tensor for tensor in saved if tensor() is not None]  # the next size finds an empty memory


@pytest.mark.parametrize("number", range(3))
def test_both_ways_of_an_elementwise_operation_do_the_same(number):
    case = cases.elementwise(workload_config("smoke", 16, batch_size=2), CPU)[number]
    contestant = case.ours()
    for _ in range(2 if contestant.reset else 1):  # what works in place finds its inputs again
        for ours, theirs in zip(contestant.call(), case.run(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_explicit_step_is_measured_without_a_graph():
    changes = {"mode": "train_step", "ops": "fused", "attention": "flash", "warmup_steps": 1, "steps": 2}
    samples = cases.measure_ungraphed(workload_config("smoke", 16, batch_size=2, vocab_size=32, **changes), None)
    assert [sample["warmup"] for sample in samples["samples"]] == [True, False, False]
    assert all(sample["wall"] > 0 for sample in samples["samples"])


def test_the_fast_path_differs_in_nothing_but_how_it_computes():
    config = TrainConfig(ops="plain", compile=False)
    plain, fast = to_dict(config), to_dict(recipes.fast(config))
    assert (plain.pop("ops"), fast.pop("ops")) == ("plain", "fused")
    assert (plain["model"].pop("attention"), fast["model"].pop("attention")) == ("plain", "flash")
    assert plain == fast


def test_flops_are_of_the_pairs_that_a_causal_mask_leaves():
    model = model_config("smoke", context_length=3, vocab_size=10)
    assert cases.attention_layer(model, 2, torch.float32).flops == 2 * 2 * 2 * model.d_model * 6
