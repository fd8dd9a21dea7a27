"""Allocation histories of a running step: from CUDA's allocator, and from the CPU's by torch.profiler."""

import contextlib
import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.profiler._utils import traverse_dfs

from lmcore.device import reset_peak_memory
from lmcore.profiling.memory.snapshot import NO_FRAME, Event, History, frame_in_lmcore, history_of, replay
from lmcore.profiling.workload import Span

MAX_ENTRIES = 1_000_000
"""Events that a CUDA record holds, as in the handout; the first ones are lost when there are more."""

COUNTERS = ("allocation.all.allocated", "allocation.all.freed")
"""What the CUDA allocator counts: allocations and frees, each an event of the record."""

PEAKS = {
    "torch_peak_bytes": "allocated_bytes.all.peak",
    "torch_requested_peak_bytes": "requested_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
}
"""Names of the CUDA allocator's own peaks, here and in `torch.cuda.memory_stats`."""

EVALUATE = "autograd::engine::evaluate_function: "

STAGE = "lmcore stage: "
"""What the profiler's ranges of stages are called, so that nothing else is taken for one."""


def record_cuda(step: Callable[[Span], Any], device: torch.device) -> tuple[History, dict[str, int], Mapping[str, Any]]:
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


def record_cpu(step: Callable[[Span], Any], standing: Iterable[Event] = (), sources: bool = True) -> History:
    """Runs `step(span)` and returns the history of the CPU's allocator, with the stages that `span` was called for.

    `standing` are the allocations known to be there before: the profiler itself sees only what happens under it.
    Without `sources` no stacks are taken, which is faster.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=sources) as profiler:
        held = step(lambda name: record_function(STAGE + name))  # until the record ends
    del held
    events, ranges = [], []
    for event in traverse_dfs(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found = event.extra_fields
            source = operator_source(event) if found.alloc_size > 0 else NO_FRAME
            events.append((event.start_time_ns, Event(found.ptr, found.alloc_size, source)))
        elif event.name.startswith(STAGE):
            ranges.append((event.start_time_ns, event.end_time_ns, event.name.removeprefix(STAGE)))
    events.sort(key=lambda pair: pair[0])
    times = [time for time, _ in events]
    start = min([*times[:1], *(begin for begin, _, _ in ranges)], default=0)
    stages = {name: (bisect_right(times, begin), bisect_right(times, end)) for begin, end, name in sorted(ranges)}
    seconds = [0.0, *((time - start) / 1e9 for time in times)]
    return History("torch.profiler, CPU allocator", replay([event for _, event in events], standing), seconds, stages)


def operator_source(event: Any) -> str:
    """What allocated: the innermost function of lmcore with its operator, or the operation of the backward pass.

    The profiler knows the line of a call into PyTorch, but not that of an operator such as `@`: then the line is the
    function's first. Without stacks only the operator is known.
    """
    operator, parent = NO_FRAME, event.parent
    while parent is not None:
        if parent.tag == _EventType.TorchOp:
            if parent.name.startswith(EVALUATE):
                return parent.name.removeprefix(EVALUATE)
            operator = parent.name.removeprefix("aten::")
        elif parent.tag in (_EventType.PyCCall, _EventType.PyCall):
            fields = parent.extra_fields
            at = fields.caller if parent.tag == _EventType.PyCCall else fields.callsite
            if line := frame_in_lmcore(at.file_name, at.line_number, at.function_name):
                return line if operator == NO_FRAME else f"{line}, {operator}"
        parent = parent.parent
    return operator


def storage_address(tensor: Tensor) -> int:
    """Where a tensor's storage lies; of one without memory (`meta`), what tells it from others."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()
