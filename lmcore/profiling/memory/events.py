"""Allocation history of the CPU, from the memory events of torch.profiler (see `lmcore.profiling.memory.snapshot`)."""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from lmcore.profiling.memory.snapshot import NO_FRAME, Event, History, Stage, frame_in_lmcore, replay
from lmcore.profiling.workload import Span

TOOL = "torch.profiler, CPU allocator"

EVALUATE = "autograd::engine::evaluate_function: "

STAGE = "lmcore stage: "
"""What the profiler's ranges of stages are called, so that nothing else is taken for one."""


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
    return History(TOOL, replay([event for _, event in events], standing), seconds, tuple(stages))


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
