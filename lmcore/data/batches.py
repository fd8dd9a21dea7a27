"""From one long sequence of token ids to batches of inputs and next-token targets (CSE599-O A1 section 5.1)."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lmcore.config import TrainConfig
from lmcore.device import select_device
from lmcore.errors import require

ALL = slice(None)
"""The whole of a batch; a process that trains with others has a part of it, `part_of_batch`."""

Batch = tuple[Int[Tensor, "batch_size context_length"], Int[Tensor, "batch_size context_length"]]


def require_context(x: np.ndarray, context_length: int, name: str = "the data") -> None:
    """Raises `UserError` unless `x` holds integers enough for one window: `context_length` inputs and one target."""
    integers = x.ndim == 1 and np.issubdtype(x.dtype, np.integer)
    require(integers, f"{name} must be a one-dimensional array of integers, not {x.dtype} of shape {x.shape}.")
    least = context_length + 1
    require(len(x) >= least, f"A context of {context_length:,} tokens needs {least:,}, but {name} has only {len(x):,}.")


def get_batch(
    x: np.ndarray,
    batch_size: int,
    context_length: int,
    device: str | torch.device,
    generator: np.random.Generator | None = None,
) -> Batch:
    """Inputs and next-token targets, int64 of shape (batch_size, context_length), at uniformly random offsets.

    Every start from 0 to `len(x) - context_length - 1` is equally likely, so that every token but the first can be a
    target. Without a `generator` the offsets come from fresh entropy; `batch_at_step` is the reproducible form.
    """
    require_context(x, context_length)
    generator = generator or np.random.default_rng()
    return gather(x, random_starts(x, batch_size, context_length, generator), context_length, device)


def batch_at_step(
    x: np.ndarray, config: TrainConfig, step: int, device: str | torch.device, part: slice = ALL
) -> Batch:
    """The batch of one training step: a function of (x, seed, step, sampling) alone, so that resuming needs no state.

    `sampling="random"` draws uniform offsets as `get_batch` does; "epoch" walks through `epoch_starts`, epoch after
    epoch, a batch spanning two epochs where one ends.
    """
    return gather(x, starts_at_step(x, config, step)[part], config.model.context_length, device)


def part_of_batch(batch_size: int, rank: int, size: int) -> slice:
    """The windows of a batch that the process `rank` of `size` trains on: equally many, one part behind the other."""
    each = batch_size // size
    return slice(rank * each, (rank + 1) * each)


def starts_at_step(x: np.ndarray, config: TrainConfig, step: int) -> np.ndarray:
    """Where the windows of a training step begin, (batch_size,); the rest of `batch_at_step` only reads them."""
    context_length = config.model.context_length
    require_context(x, context_length, config.data)
    if config.sampling == "random":
        return random_starts(x, config.batch_size, context_length, np.random.default_rng([config.seed, step]))
    windows = num_windows_per_epoch(len(x), context_length)
    epochs, indices = np.divmod(np.arange(step * config.batch_size, (step + 1) * config.batch_size), windows)
    starts = np.empty_like(indices)
    for epoch in range(epochs[0], epochs[-1] + 1):
        here = epochs == epoch
        starts[here] = epoch_starts(len(x), context_length, config.seed, epoch)[indices[here]]
    return starts


def random_starts(x: np.ndarray, batch_size: int, context_length: int, generator: np.random.Generator) -> np.ndarray:
    """Independent uniform starts of windows with all their targets, (batch_size,)."""
    return generator.integers(0, len(x) - context_length, size=batch_size)


def num_windows_per_epoch(num_tokens: int, context_length: int) -> int:
    """Windows of one epoch: as many as fit without overlap behind the largest possible phase."""
    return max(1, (num_tokens - context_length) // context_length)


@lru_cache(maxsize=2)
def epoch_starts(num_tokens: int, context_length: int, seed: int, epoch: int) -> np.ndarray:
    """Starts of the non-overlapping windows of one epoch in random order; (seed, epoch) decide.

    All windows begin at a random phase, so that a token has a different place in its window in every epoch. Each epoch
    leaves out fewer than 2 * context_length tokens, at the two ends of the corpus.
    """
    generator = np.random.default_rng([seed, epoch, 1])  # the 1 keeps it apart from the streams of random sampling
    windows = num_windows_per_epoch(num_tokens, context_length)
    phase = generator.integers(0, min(context_length, num_tokens - windows * context_length))
    starts = phase + context_length * generator.permutation(windows)
    starts.setflags(write=False)
    return starts


def num_validation_windows(num_tokens: int, context_length: int) -> int:
    """Windows that `validation_batches` covers: the last tokens that do not fill one are left out."""
    return (num_tokens - 1) // context_length


def validation_batches(
    x: np.ndarray, context_length: int, batch_size: int, device: str | torch.device, rank: int = 0, size: int = 1
) -> Iterator[Batch]:
    """The whole of `x` in order as non-overlapping windows; the last batch may be smaller.

    Dealt out to several processes, that of `rank` gets every `size`-th batch, and all of them equally many: where none
    is left, an empty one.

    Every token but the first is a target exactly once, up to fewer than `context_length` at the end
    (`num_validation_windows`).
    """
    require_context(x, context_length, "the validation data")
    starts = context_length * np.arange(num_validation_windows(len(x), context_length))
    for first in range(0, len(starts), batch_size * size):
        first += rank * batch_size
        yield gather(x, starts[first : first + batch_size], context_length, device)


def gather(x: np.ndarray, starts: np.ndarray, context_length: int, device: str | torch.device) -> Batch:
    """The windows of `x` at `starts` and the same shifted by one, on `device`."""
    both = read_windows(x, starts, torch.empty((2, len(starts), context_length), dtype=torch.int64))
    if torch.device(device).type == "cuda":  # from pinned memory the copy runs beside the GPU's work on the step before
        both = both.pin_memory().to(device, non_blocking=True)
    inputs, targets = both.to(device)
    return inputs, targets


def read_windows(
    x: np.ndarray, starts: np.ndarray, out: Int[Tensor, "2 batch_size context_length"]
) -> Int[Tensor, "2 batch_size context_length"]:
    """Reads the windows of `x` at `starts` into `out[0]`, and the same shifted by one into `out[1]`, on the CPU."""
    windows = np.lib.stride_tricks.sliding_window_view(x, out.shape[-1] + 1)[starts]
    inputs, targets = out.numpy()
    inputs[:], targets[:] = windows[:, :-1], windows[:, 1:]
    return out


@contextmanager
def prefetched(
    x: np.ndarray, config: TrainConfig, first_step: int, device: str | torch.device, part: slice = ALL
) -> Iterator[Iterator[Batch]]:
    """The batches of the steps from `first_step` to the last one, each exactly what `batch_at_step` gives.

        with prefetched(data.train, config, first_step, device) as batches:
            inputs, targets = next(batches)

    For a GPU a thread reads them ahead into pinned memory, from which they are copied beside the GPU's work; it has
    ended when the block is left. Elsewhere a batch is read when it is asked for: that takes less than a hundredth of
    a step. Raises `UserError` for a device that is not there.
    """
    device, _ = select_device(str(device))
    if device.type != "cuda":
        yield (batch_at_step(x, config, step, device, part) for step in range(first_step, config.steps))
        return
    with closing(read_ahead(x, config, first_step, part, pinned=True)) as reader:
        yield copied_ahead(reader, device)


def copied_ahead(reader: Iterator[Tensor], device: torch.device) -> Iterator[Batch]:
    """The reader's batches on the GPU; while one is in use the next is copied, on a stream of its own.

    All calls to CUDA are made in the consumer's thread: those of another one could break the capture of a CUDA graph.
    A batch is the consumer's to keep, for use on the stream that was current when it came.
    """
    copies = torch.cuda.Stream(device)

    def begin() -> tuple[Tensor, torch.cuda.Event] | None:
        for host in reader:
            with torch.cuda.stream(copies):
                return host.to(device, non_blocking=True), copies.record_event()
        return None

    begun = begin()
    while begun is not None:
        batch, copied = begun
        copied.synchronize()  # begun a step ago and behind nothing but other copies: this waits for no work of the GPU
        batch.record_stream(torch.cuda.current_stream(device))  # where it is used, and not to be overwritten before
        begun = begin()
        yield batch[0], batch[1]


def read_ahead(
    x: np.ndarray, config: TrainConfig, first_step: int, part: slice = ALL, *, pinned: bool = False, depth: int = 3
) -> Generator[Tensor, None, None]:
    """The batches of the steps from `first_step` to the last one: inputs and targets, (2, batch_size, context_length).

    A thread reads them into `depth` buffers, which are used again: one is the consumer's until it asks for the next.
    The thread ends with the iterator (`close`).
    """
    shape = (2, len(range(config.batch_size)[part]), config.model.context_length)
    buffers = [torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(depth)]

    def read(step: int) -> Tensor:
        return read_windows(x, starts_at_step(x, config, step)[part], buffers[step % depth])

    with ThreadPoolExecutor(1, "lmcore-batches") as pool:
        submitted = (pool.submit(read, step) for step in range(first_step, config.steps))
        reads = deque(islice(submitted, depth))
        try:
            while reads:
                yield reads.popleft().result()
                reads.extend(islice(submitted, 1))
        finally:
            pool.shutdown(cancel_futures=True)
