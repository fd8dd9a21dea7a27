"""Allocation histories of a running step: from CUDA's allocator, and from the lives of tensors' storages."""

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from timeit import default_timer
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmcore.device import reset_peak_memory
from lmcore.profiling.memory.snapshot import PROFILERS, Event, History, history_of, replay, running_line
from lmcore.profiling.workload import Step

MAX_ENTRIES = 1_000_000
"""Events that a CUDA record holds, as in the handout; the first ones are lost when there are more."""

COUNTERS = ("allocation.all.allocated", "allocation.all.freed")
"""What the CUDA allocator counts: allocations and frees, each an event of the record."""

PEAKS = {
    "torch_peak_bytes": "allocated_bytes.all.peak",
    "torch_requested_peak_bytes": "requested_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
}
"""The CUDA allocator's own peaks, by our names and those of `torch.cuda.memory_stats`: as `max_memory_allocated` says,
rounded up by the allocator; of requested bytes; and of what is reserved."""


def record_cuda(step: Step, device: torch.device) -> tuple[History, dict[str, int], Mapping[str, Any]]:
    """The CUDA allocator's history of `step(span)` with its stages, the allocator's own peaks, and the snapshot.

    Stages begin and end at numbers of allocations and frees, which the allocator counts: no clock is compared.
    """
    edges: dict[str, list[dict[str, int]]] = {}

    @contextlib.contextmanager
    def counting(name: str) -> Iterator[None]:
        edges[name] = [torch.cuda.memory_stats(device)]
        yield
        edges[name].append(torch.cuda.memory_stats(device))

    reset_peak_memory(device)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)
    try:
        with counting("the record"):
            held = step(counting)
            torch.cuda.synchronize(device)
        snapshot = torch.cuda.memory._snapshot()
        del held
    finally:
        torch.cuda.memory._record_memory_history(None)
    history, (begin, end) = history_of(snapshot, device.index or 0), edges.pop("the record")

    def state(moment: Mapping[str, int]) -> int:  # from the end, as a full record has lost its beginning
        return max(0, len(history.seconds) - 1 - sum(end[counter] - moment[counter] for counter in COUNTERS))

    stages = {name: (state(first), state(last)) for name, (first, last) in edges.items()}
    truncated = sum(history.allocations["first"] > 0) < end[COUNTERS[0]] - begin[COUNTERS[0]]
    peaks = {name: end[counter] for name, counter in PEAKS.items()}
    return dataclasses.replace(history, stages=stages, truncated=truncated), peaks, snapshot


aten = torch.ops.aten
IN_PLACE = {aten.scatter_add.default: aten.scatter_add_.default, aten.index_put.default: aten.index_put_.default}
"""What the backward passes of gather and of indexing do to their zeros; where a mode looks on, they take copies."""


class StorageEvents(TorchDispatchMode):
    """While it is on, notes which storages operations make, and when nothing holds them any more.

    Each is an event, as an allocator's, in the bytes that tensors ask for. A source is the innermost line of lmcore
    with the operator, or the node of the backward pass.
    """

    def __init__(self):
        super().__init__()
        self.alive: dict[int, int] = {}  # bytes by address
        self.events: list[Event] = []
        self.seconds = [default_timer()]
        self.stages: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note((args, kwargs))  # what was there before
        result = IN_PLACE.get(func, func)(*args, **(kwargs or {}))
        self.note(result, func.overloadpacket.__name__)
        return result

    def note(self, tensors: Any, operator: str | None = None) -> None:
        """Watches the storages of tensors from now on; those that an operator has made begin with an event."""
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":  # fake ones are of another device
                continue
            if (address := storage_address(tensor)) not in self.alive:
                storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
                self.alive[address] = size
                if operator is not None:
                    line, node = running_line(sys._getframe(2)), torch._C._current_autograd_node()
                    line = node.name() if node and line.startswith(PROFILERS) else f"{line}, {operator}"
                    self.add(Event(address, size, line))
                weakref.finalize(storage, self._end, address).atexit = False

    def _end(self, address: int) -> None:
        self.add(Event(address, -self.alive.pop(address)))

    def add(self, event: Event) -> None:
        """Notes an event, and when it was."""
        self.events.append(event)
        self.seconds.append(default_timer())

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Notes a stage of a step (see `Workload.step`)."""
        first = len(self.events)
        yield
        self.stages[name] = (first, len(self.events))

    def history(self, tool: str, standing: Iterable[Event] = ()) -> History:
        """The history so far; `standing` are the storages known to be there before."""
        begin, *later = self.seconds[-1 - len(self.events) :]
        seconds = [0.0, *(moment - begin for moment in later)]
        return History(tool, replay([*self.events], standing), seconds, self.stages)


def record_cpu(step: Step, standing: Iterable[Event] = (), tensors: Iterable[Any] = ()) -> History:
    """Runs `step(span)` and returns the history of its storages, with the stages that `span` was called for.

    Before it were the `standing` storages; of those of `tensors` the end is noted even if no operation uses them.
    """
    with StorageEvents() as memory:
        memory.note(list(tensors))
        held = step(memory.span)
    history = memory.history("storages of tensors on the CPU", standing)
    del held
    return history


def storage_address(tensor: Tensor) -> int:
    """Where a tensor's storage lies; of one without memory (`meta`), what tells it from others."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()
