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

from lmcore.device import forget_memory
from lmcore.profiling.memory.snapshot import (
    NO_FRAME,
    Event,
    History,
    Stage,
    counted_states,
    frame_in_lmcore,
    history_of,
    replay,
    state_after,
)
from lmcore.profiling.workload import Span

MAX_ENTRIES = 1_000_000
"""Events that a CUDA record holds, as in the handout; the first ones are lost when there are more."""

EVALUATE = "autograd::engine::evaluate_function: "

STAGE = "lmcore stage: "
"""What the profiler's ranges of stages are called, so that nothing else is taken for one."""


def record_cuda(step: Callable[[Span], Any], device: torch.device) -> tuple[History, dict[str, int], Mapping[str, Any]]:
    """The CUDA allocator's history of `step(span)` with its stages, the allocator's own peaks, and the snapshot.

    Stages begin and end at numbers of allocations and frees, which the allocator counts: no clock is compared.
    """
    forget_memory(device)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)
    try:
        counts: list[tuple[str, tuple[int, int], tuple[int, int]]] = []

        @contextlib.contextmanager
        def counting(name: str) -> Iterator[None]:
            begin = cuda_counts(device)
            yield
            counts.append((name, begin, cuda_counts(device)))

        begin = cuda_counts(device)
        held = step(counting)
        torch.cuda.synchronize(device)
        end = cuda_counts(device)
        peaks = cuda_peaks(device)
        snapshot = torch.cuda.memory._snapshot()
        del held
    finally:
        torch.cuda.memory._record_memory_history(None)
    index = device.index or 0
    history = history_of(snapshot, index)
    told = counted_states(snapshot["device_traces"][index])
    stages = [
        Stage(name, *(state_after(end[0] - moment[0], end[1] - moment[1], told) for moment in (first, last)))
        for name, first, last in counts
    ]
    truncated = len(told[0]) < end[0] - begin[0]
    return dataclasses.replace(history, stages=tuple(stages), truncated=truncated), peaks, snapshot


def cuda_counts(device: torch.device) -> tuple[int, int]:
    """Allocations made and frees asked for on a GPU so far."""
    counted = torch.cuda.memory_stats(device)
    return counted["allocation.all.allocated"], counted["allocation.all.freed"]


def cuda_peaks(device: torch.device) -> dict[str, int]:
    """The allocator's own peaks since they were last reset."""
    return {
        "torch_peak_bytes": torch.cuda.max_memory_allocated(device),
        "torch_requested_peak_bytes": torch.cuda.memory_stats(device)["requested_bytes.all.peak"],
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
    }


def record_cpu(step: Callable[[Span], Any], standing: Iterable[Event], sources: bool = True) -> History:
    """Runs `step(span)` and returns the history of the CPU's allocator, with the stages that `span` was called for.

    `standing` are the allocations known to be there before: the profiler itself sees only what happens under it.
    Without `sources` no stacks are taken, which is faster.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=sources) as profiler:
        held = step(stage_span)  # until the record ends
    del held
    return history_of_events(profiler.profiler.kineto_results.experimental_event_tree(), standing)


@contextlib.contextmanager
def stage_span(name: str) -> Iterator[None]:
    """The span that makes a stage visible in the profiler's record."""
    with record_function(STAGE + name):
        yield


def history_of_events(roots: Iterable[Any], standing: Iterable[Event]) -> History:
    """The history that an event tree of torch.profiler holds for the CPU's allocator."""
    events, ranges = [], []
    for event in tree(roots):
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found = event.extra_fields
            source = operator_source(event) if found.alloc_size > 0 else NO_FRAME
            events.append((event.start_time_ns, Event(found.ptr, found.alloc_size, 0.0, source)))
        elif event.name.startswith(STAGE):
            ranges.append((event.start_time_ns, event.end_time_ns, event.name.removeprefix(STAGE)))
    events.sort(key=lambda pair: pair[0])
    times = [time for time, _ in events]
    start = min([*times[:1], *(begin for begin, _, _ in ranges)], default=0)
    stages = [Stage(name, bisect_right(times, begin), bisect_right(times, end)) for begin, end, name in sorted(ranges)]
    seconds = (0.0, *((time - start) / 1e9 for time in times))
    return History(
        "torch.profiler, CPU allocator", replay([event for _, event in events], standing), seconds, tuple(stages)
    )


def tree(roots: Iterable[Any]) -> Iterator[Any]:
    """All events of a tree, without recursion, as Python stacks are deep."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def operator_source(event: Any) -> str:
    """What allocated: the innermost function of lmcore with its operator, or the operation of the backward pass.

    The profiler knows the line of a call into PyTorch, but not that of an operator such as `@`: then the line is the
    function's first. Without stacks only the operator is known.
    """
    operator, line = None, None
    parent = event.parent
    while parent is not None:
        found = parent.extra_fields
        if parent.tag == _EventType.TorchOp:
            if parent.name.startswith(EVALUATE):
                return parent.name.removeprefix(EVALUATE)
            operator = operator if line else parent.name.removeprefix("aten::")
        elif parent.tag == _EventType.PyCCall:
            line = frame_in_lmcore(found.caller.file_name, found.caller.line_number, found.caller.function_name) or line
        elif parent.tag == _EventType.PyCall:
            start = found.callsite
            line = line or frame_in_lmcore(start.file_name, start.line_number, start.function_name)
            if line:
                break
        parent = parent.parent
    return ", ".join(part for part in (line, operator) if part) or NO_FRAME


def storage_address(tensor: Tensor) -> int:
    """Where a tensor's storage lies; of one without memory (`meta`), what tells it from others."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()
