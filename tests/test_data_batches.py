"""Batches: shapes, shifted targets, uniform starts, reproducible steps, whole epochs, whole validation."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.config import ModelConfig, TrainConfig
from lmcore.data import (
    batch_at_step,
    get_batch,
    num_validation_windows,
    num_windows_per_epoch,
    require_context,
    validation_batches,
)
from lmcore.errors import UserError


def train_config(context_length=8, batch_size=4, **options):
    return TrainConfig(ModelConfig(context_length=context_length), batch_size=batch_size, **options)


def test_get_batch_as_the_course_tests_it():
    """Shapes, targets one ahead, and every start about equally often over 1,000 batches."""
    dataset, context_length, batch_size, iterations = np.arange(0, 100), 7, 32, 1000
    starts = Counter()
    for _ in range(iterations):
        x, y = get_batch(dataset, batch_size, context_length, "cpu")
        assert x.shape == y.shape == (batch_size, context_length)
        assert x.dtype == y.dtype == torch.int64
        torch.testing.assert_close(x + 1, y)
        starts.update(x[:, 0].tolist())
    num_starts = len(dataset) - context_length
    assert (min(starts), max(starts)) == (0, num_starts - 1)
    expected = iterations * batch_size / num_starts
    deviation = math.sqrt(iterations * batch_size * (1 / num_starts) * (1 - 1 / num_starts))
    for start in range(num_starts):
        assert abs(starts[start] - expected) < 5 * deviation
    with pytest.raises((RuntimeError, AssertionError)):
        get_batch(dataset, batch_size, context_length, "cuda:99")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
def test_get_batch_keeps_ids_of_every_type(dtype):
    largest = min(np.iinfo(dtype).max, 2**40)
    x, y = get_batch(np.full(10, largest, dtype=dtype), 2, 4, "cpu")
    assert x.dtype == torch.int64
    assert (x == largest).all()
    assert (y == largest).all()


def test_get_batch_on_a_memmap_with_a_generator(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    x = np.memmap(tmp_path / "x.bin", dtype=np.uint16, mode="r")
    first = get_batch(x, 4, 16, "cpu", np.random.default_rng(1))
    again = get_batch(x, 4, 16, "cpu", np.random.default_rng(1))
    other = get_batch(x, 4, 16, "cpu", np.random.default_rng(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_shortest_corpus_has_one_window():
    x, y = get_batch(np.arange(6), 3, 5, "cpu")
    assert x.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert y.tolist() == [[1, 2, 3, 4, 5]] * 3


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.arange(5), "A context of 5 tokens needs at least 6, but tiny has only 5"),
        (np.arange(0), "has only 0"),
        (np.zeros((3, 9), dtype=np.int64), "one-dimensional"),
        (np.zeros(9), "integers"),
    ],
)
def test_require_context(x, sentence):
    with pytest.raises(UserError, match=sentence):
        require_context(x, 5, "tiny")
    for sampling in ("random", "epoch"):
        with pytest.raises(UserError):
            batch_at_step(x, train_config(context_length=5, sampling=sampling), 0, "cpu")
    with pytest.raises(UserError):
        next(validation_batches(x, 5, 2, "cpu"))


@pytest.mark.parametrize("sampling", ["random", "epoch"])
def test_a_step_is_a_function_of_seed_and_step(sampling):
    x = np.arange(500)
    config = train_config(sampling=sampling, seed=5)
    batches = [batch_at_step(x, config, step, "cpu")[0] for step in range(40)]
    for step in (39, 3, 17, 0):  # in any order, as after a resumption
        assert torch.equal(batch_at_step(x, config, step, "cpu")[0], batches[step])
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == 40
    other = train_config(sampling=sampling, seed=6)
    assert not torch.equal(batch_at_step(x, other, 0, "cpu")[0], batches[0])


def test_random_steps_cover_all_starts():
    x = np.arange(40)
    config = train_config(context_length=7, batch_size=32)
    starts = {start for step in range(60) for start in batch_at_step(x, config, step, "cpu")[0][:, 0].tolist()}
    assert starts == set(range(33))


@settings(max_examples=60, deadline=None)
@given(
    context_length=st.integers(1, 9),
    extra=st.integers(1, 120),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_epochs_use_each_window_once(context_length, extra, batch_size, seed):
    """Cut anew into epochs, the windows of the steps are disjoint, in one phase, and all but the ends is covered."""
    num_tokens = context_length + extra
    x = np.arange(num_tokens)
    config = train_config(context_length=context_length, batch_size=batch_size, sampling="epoch", seed=seed)
    windows = num_windows_per_epoch(num_tokens, context_length)
    starts = []
    while len(starts) < 3 * windows:
        inputs, targets = batch_at_step(x, config, len(starts) // batch_size, "cpu")
        assert torch.equal(inputs + 1, targets)
        assert (inputs[:, :-1] + 1 == inputs[:, 1:]).all()
        assert targets.max() < num_tokens
        starts += inputs[:, 0].tolist()
    for epoch in range(3):
        of_epoch = sorted(starts[epoch * windows : (epoch + 1) * windows])
        assert 0 <= of_epoch[0] < context_length
        assert np.array_equal(np.diff(of_epoch), np.full(windows - 1, context_length))
        assert num_tokens - windows * context_length <= 2 * context_length


def test_epochs_differ_in_order_and_phase():
    x = np.arange(1000)
    config = train_config(context_length=10, batch_size=99, sampling="epoch")
    assert num_windows_per_epoch(1000, 10) == 99
    epochs = [tuple(batch_at_step(x, config, step, "cpu")[0][:, 0].tolist()) for step in range(60)]
    assert len({epoch[0] // 10 for epoch in epochs}) > 10
    assert {epoch[0] % 10 for epoch in epochs} == set(range(10))
    assert all(list(epoch) != sorted(epoch) for epoch in epochs)


@settings(max_examples=60, deadline=None)
@given(context_length=st.integers(1, 9), extra=st.integers(1, 60), batch_size=st.integers(1, 12))
def test_validation_covers_everything_in_order(context_length, extra, batch_size):
    num_tokens = context_length + extra
    batches = list(validation_batches(np.arange(num_tokens), context_length, batch_size, "cpu"))
    targets = torch.cat([targets.flatten() for _, targets in batches])
    inputs = torch.cat([inputs.flatten() for inputs, _ in batches])
    covered = num_validation_windows(num_tokens, context_length) * context_length
    assert inputs.tolist() == list(range(covered))
    assert targets.tolist() == list(range(1, covered + 1))
    assert 0 <= num_tokens - 1 - covered < context_length
    assert all(len(inputs) == batch_size for inputs, _ in batches[:-1])


@pytest.mark.gpu
def test_batches_reach_the_gpu():
    x = np.arange(1000, dtype=np.uint16)
    for step in range(20):
        on_gpu = batch_at_step(x, train_config(), step, "cuda")
        on_cpu = batch_at_step(x, train_config(), step, "cpu")
        assert on_gpu[0].device.type == "cuda"
        assert torch.equal(on_gpu[0].cpu(), on_cpu[0])
        assert torch.equal(on_gpu[1].cpu(), on_cpu[1])
