"""Batches of the coming training steps, read and copied while the device still works on the steps before."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lmcore.config import TrainConfig
from lmcore.data.batches import Batch, batch_at_step, read_windows, starts_at_step
from lmcore.device import select_device

DEPTH = 3
"""Buffers of a reader: one on its way to the device, the others filled while nobody waits."""


@contextmanager
def prefetched(
    x: np.ndarray, config: TrainConfig, first_step: int, device: str | torch.device
) -> Iterator[Iterator[Batch]]:
    """The batches of the steps from `first_step` to the last one, each exactly what `batch_at_step` gives.

        with prefetched(data.train, config, first_step, device) as batches:
            inputs, targets = next(batches)

    For a GPU a thread reads them ahead into pinned memory, from which they are copied beside the GPU's work; it has
    ended when the block is left. Elsewhere a batch is read when it is asked for: that takes less than a hundredth of
    a step, and handing it from thread to thread would take as long. What goes wrong with a batch is raised by the
    `next` that asks for it. Raises `UserError` for a device that is not there.
    """
    device, _ = select_device(str(device))
    if device.type != "cuda":
        yield (batch_at_step(x, config, step, device) for step in range(first_step, config.steps))
        return
    with BatchReader(x, config, first_step, pinned=True) as reader:
        yield copied_ahead(reader, device)


def copied_ahead(reader: "BatchReader", device: torch.device) -> Iterator[Batch]:
    """The reader's batches on the GPU; while one is in use the next is copied, on a stream of its own.

    All calls to CUDA are made in the consumer's thread: those of another one could break the capture of a CUDA graph.
    A batch is the consumer's to keep, for use on the stream that was current when it came.
    """
    copies = torch.cuda.Stream(device)

    def begin(item: Tensor | BaseException | None) -> tuple:
        if not isinstance(item, Tensor):
            return item, None, None
        with torch.cuda.stream(copies):
            return item, item.to(device, non_blocking=True), copies.record_event()

    item, batch, copied = begin(reader.take())
    while batch is not None:
        copied.synchronize()  # begun a step ago and behind nothing but other copies: this waits for no work of the GPU
        reader.give_back(item)
        batch.record_stream(torch.cuda.current_stream(device))  # where it is used, and not to be overwritten before
        inputs, targets = batch[0], batch[1]
        item, batch, copied = begin(reader.take())
        yield inputs, targets
    if item is not None:
        raise item


class BatchReader:
    """A thread that reads the batches of the steps from `first_step` to the last one into a few reused buffers.

    A context manager: the thread starts with the block and has ended behind it, whatever ended the block.
    """

    def __init__(self, x: np.ndarray, config: TrainConfig, first_step: int, *, pinned: bool, depth: int = DEPTH):
        self._x, self._config, self._steps = x, config, range(first_step, config.steps)
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Tensor | BaseException | None] = queue.SimpleQueue()
        for _ in range(depth):
            shape = (2, config.batch_size, config.model.context_length)
            self._free.put(torch.empty(shape, dtype=torch.int64, pin_memory=pinned))
        self._closed = threading.Event()
        # a daemon: should the block never be left, the end of the program does not wait for it
        self._thread = threading.Thread(target=self._read, name="lmcore-batches", daemon=True)

    def __enter__(self) -> "BatchReader":
        try:
            self._thread.start()
        except BaseException:  # an interrupt may come when it runs already
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._closed.set()
        self._free.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._ready.put(None)  # a batch asked for behind the block is an end, not a wait

    def take(self) -> Tensor | BaseException | None:
        """Waits for the next batch, (2, batch_size, context_length): inputs and targets, the caller's until given back.

        None instead of it behind the last step, or what went wrong with it; nothing comes after either.
        """
        return self._ready.get()

    def give_back(self, buffer: Tensor) -> None:
        """Lets the thread read another batch into `buffer`."""
        self._free.put(buffer)

    def _read(self) -> None:
        try:
            for step in self._steps:
                buffer = self._free.get()
                if buffer is None or self._closed.is_set():
                    return
                read_windows(self._x, starts_at_step(self._x, self._config, step), buffer)
                self._ready.put(buffer)
            self._ready.put(None)
        except BaseException as error:  # whatever it is, the consumer is to know
            self._ready.put(error)
