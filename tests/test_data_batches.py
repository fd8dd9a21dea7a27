"""Batches: shifted targets, uniform starts, reproducible steps, whole epochs, whole validation; and read ahead."""

import math
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.config import ModelConfig, TrainConfig
from lmcore.data.batches import (
    batch_at_step,
    get_batch,
    num_validation_windows,
    num_windows_per_epoch,
    prefetched,
    read_ahead,
    require_context,
    validation_batches,
)
from lmcore.errors import UserError

SAMPLINGS = pytest.mark.parametrize("sampling", ["random", "epoch"])


def train_config(context_length=8, batch_size=4, steps=20, **options):
    return TrainConfig(ModelConfig(context_length=context_length), batch_size=batch_size, steps=steps, **options)


def test_get_batch_takes_every_start_equally_often():
    starts, windows, context_length = 93, 16_000, 7
    x, y = get_batch(np.arange(100), windows, context_length, "cpu")
    assert x.shape == y.shape == (windows, context_length)
    assert x.dtype == y.dtype == torch.int64
    torch.testing.assert_close(x + 1, y)
    counts = np.bincount(x[:, 0], minlength=starts)
    assert len(counts) == starts
    expected = windows / starts
    assert abs(counts - expected).max() < 5 * math.sqrt(expected * (1 - 1 / starts))
    with pytest.raises((RuntimeError, AssertionError)):
        get_batch(np.arange(100), windows, context_length, "cuda:99")


def test_data_that_hold_no_window():
    for x, sentence in (
        (np.arange(5), "A context of 5 tokens needs 6, but tiny has only 5"),
        (np.zeros((3, 9), dtype=np.int64), "one-dimensional"),
        (np.zeros(9), "integers"),
    ):
        with pytest.raises(UserError, match=sentence):
            require_context(x, 5, "tiny")
        with pytest.raises(UserError):
            batch_at_step(x, train_config(context_length=5), 0, "cpu")


@SAMPLINGS
def test_a_step_is_a_function_of_seed_and_step(sampling):
    x = np.arange(520)  # 64 windows, so that each epoch begins with a batch
    configs = [train_config(sampling=sampling, seed=seed) for seed in (5, 6, 7)]
    batches = [[batch_at_step(x, config, step, "cpu")[0] for step in range(40)] for config in configs]
    for step in (39, 3, 17, 0):  # in any order, as after a resumption
        assert torch.equal(batch_at_step(x, configs[0], step, "cpu")[0], batches[0][step])
    assert len({tuple(batch.flatten().tolist()) for run in batches for batch in run}) == 3 * 40  # seeds share none


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 120), st.integers(1, 40), st.integers(0, 2**32))
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
    config = train_config(context_length=10, batch_size=99, sampling="epoch")
    epochs = [batch_at_step(np.arange(1000), config, step, "cpu")[0][:, 0].tolist() for step in range(60)]
    assert len({epoch[0] // 10 for epoch in epochs}) > 10
    assert {epoch[0] % 10 for epoch in epochs} == set(range(10))
    assert all(epoch != sorted(epoch) for epoch in epochs)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 12), st.integers(1, 4))
def test_validation_covers_everything_and_ranks_share_it_in_equally_many_batches(
    context_length, extra, batch_size, size
):
    """A rank with a batch less would leave the others waiting in a collective."""
    x = np.arange(context_length + extra)
    batches = list(validation_batches(x, context_length, batch_size, "cpu"))
    inputs, targets = (torch.cat([batch[part].flatten() for batch in batches]) for part in (0, 1))
    covered = num_validation_windows(len(x), context_length) * context_length
    assert inputs.tolist() == list(range(covered))
    assert targets.tolist() == list(range(1, covered + 1))
    assert 0 <= len(x) - 1 - covered < context_length
    assert all(len(inputs) == batch_size for inputs, _ in batches[:-1])
    ranks = [[*validation_batches(x, context_length, batch_size, "cpu", rank, size)] for rank in range(size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert_same([part for turn in zip(*ranks, strict=True) for part in turn if len(part[0])], batches)


# ------------------------------------------------------------------------------------------------ read ahead


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lmcore-batches")]


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        for part in (0, 1):
            assert batch[part].dtype == torch.int64
            assert batch[part].is_contiguous()
            assert torch.equal(batch[part].cpu(), other[part])


@settings(max_examples=40, deadline=None)
@given(
    sampling=st.sampled_from(["random", "epoch"]),
    dtype=st.sampled_from([np.uint8, np.uint16, np.uint32, np.int64]),
    context_length=st.integers(1, 9),
    batch_size=st.integers(1, 40),
    first_step=st.integers(0, 11),
    depth=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_batches_are_those_of_the_steps(sampling, dtype, context_length, batch_size, first_step, depth, seed):
    """Both ways to read ahead, from any step; 11 is behind the last one. Several epochs pass."""
    x = np.arange(100, dtype=dtype)
    config = train_config(context_length, batch_size, steps=11, sampling=sampling, seed=seed)
    expected = [batch_at_step(x, config, step, "cpu") for step in range(first_step, 11)]
    with prefetched(x, config, first_step, "cpu") as batches:
        assert_same(list(batches), expected)
    assert_same([tuple(buffer.clone()) for buffer in read_ahead(x, config, first_step, depth=depth)], expected)
    assert not reader_threads()


def test_a_buffer_is_left_alone_until_the_next_is_asked_for():
    """The thread fills the others meanwhile, and takes it up again afterwards."""
    x, config = np.arange(500), train_config()
    with closing(read_ahead(x, config, 0, depth=3)) as reader:
        places = []
        for step in range(7):
            buffer = next(reader)
            time.sleep(0.02)
            assert_same([buffer], [batch_at_step(x, config, step, "cpu")])
            places.append(buffer.data_ptr())
    assert len(set(places)) == 3


def starts_until_7(x, config, step):
    """Stands for `starts_at_step` where step 7 cannot be read."""
    if step == 7:
        raise OSError("the disk is gone")
    return np.arange(config.batch_size) + step


def test_an_error_comes_behind_the_batches_before_it_and_leaving_early_ends_the_thread(monkeypatch):
    with closing(read_ahead(np.arange(500), train_config(steps=10**9), 0)) as reader:
        next(reader)
        assert len(reader_threads()) == 1
    assert not reader_threads()
    monkeypatch.setattr("lmcore.data.batches.starts_at_step", starts_until_7)
    good = []
    with pytest.raises(OSError, match="the disk is gone"):
        good.extend(int(buffer[0, 0, 0]) for buffer in read_ahead(np.arange(100), train_config(), 4))
    assert good == [4, 5, 6]
    assert not reader_threads()


@pytest.mark.gpu
@SAMPLINGS
def test_batches_on_the_gpu(sampling):
    """Also those that are kept, and those that slow work reads long after they were handed out; a graph is captured."""
    x, config = np.arange(60_000, dtype=np.uint16), train_config(256, 64, steps=200, sampling=sampling)
    expected = [batch_at_step(x, config, step, "cpu") for step in range(50, 200)]
    assert_same([batch_at_step(x, config, step, "cuda") for step in range(50, 70)], expected[:20])
    held, sums = torch.zeros(64, 256, dtype=torch.int64, device="cuda"), []
    held.sum()  # allocates what the capture needs
    copies, kept = [], []
    graph = torch.cuda.CUDAGraph()
    with prefetched(x, config, 50, "cuda") as batches:
        for step, (inputs, targets) in enumerate(batches):
            if step == 0:  # while the thread reads
                with torch.cuda.graph(graph):
                    total = held.sum()
            torch.cuda._sleep(2_000_000)  # the copies below run milliseconds after the loop has gone on
            copies.append((inputs.clone(), targets.clone()))
            held.copy_(inputs)
            graph.replay()
            sums.append(total.clone())
            if step % 5 == 0:
                kept.append((inputs, targets))
            del inputs, targets
    assert_same(copies, expected)
    assert_same(kept, expected[::5])
    assert torch.stack(sums).tolist() == [inputs.sum().item() for inputs, _ in expected]
    assert not reader_threads()


@pytest.mark.gpu
def test_errors_and_early_ends_on_the_gpu(monkeypatch):
    monkeypatch.setattr("lmcore.data.batches.starts_at_step", starts_until_7)
    good = []
    ahead = prefetched(np.arange(99), train_config(), 4, "cuda")
    with pytest.raises(OSError, match="the disk is gone"), ahead as batches:
        good.extend(int(inputs[0, 0]) for inputs, _ in batches)
    assert good in ([4, 5], [4, 5, 6])  # the next is copied while one is in use
    with prefetched(np.arange(99), train_config(steps=10**9), 4, "cuda") as batches:
        next(batches)
    assert not reader_threads()
