"""Contestants take turns at the same work, so that what the machine does meanwhile falls on all of them."""

import math
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from timeit import default_timer
from typing import Any

import torch
from torch import Tensor

from lmcore.device import forget_memory, out_of_memory_reason

from .rows import Cell, Conditions, Row

FLUSH_BYTES = 1 << 28
"""Written before a call that is timed alone: more than the GPU's cache holds."""

FEWEST, MOST = 7, 200
"""Repeats of one contestant."""


class Absent(Exception):
    """A contestant that this machine or its software does not have; the message says why."""


@dataclass
class Built:
    """A contestant that is ready: what is timed, and what there is to know of its results."""

    run: Callable[[], Any]
    reset: Callable[[], Any] | None = None
    """Called, untimed, before every timed call of a contestant that works in place or goes on from somewhere."""
    results: Any = None
    """Tensor or tensors that `Race.reference` is held against."""
    notes: dict[str, Any] = field(default_factory=dict)

    def call(self) -> None:
        """One call, on fresh inputs where it matters."""
        if self.reset is not None:
            self.reset()
        self.run()


@dataclass(frozen=True)
class Contestant:
    """Someone who does the work: `build` makes everything that it needs, compiles it and runs it once."""

    name: str
    build: Callable[[], Built]
    ours: bool = False


@dataclass
class Race:
    """The contestants of one cell, and how their results are checked and their times turned into rates.

    `alone` times each call by itself, with the cache written over and the host's work hidden behind that, which is
    what a kernel takes; otherwise calls run back to back, as the steps of a training run do, launches included.
    """

    cell: Cell
    conditions: Conditions
    contestants: Sequence[Contestant]
    alone: bool = True
    reference: Any = None
    amount: float | None = None
    """What one call does of `rate_unit` * seconds, such as its TFLOP."""
    rate_unit: str | None = None
    share: Callable[[float], float | None] = lambda seconds: None
    """Share that a time in seconds means."""
    share_of: str | None = None

    def __post_init__(self):
        self.clock = Clock(torch.device(self.conditions.device), self.alone)

    def rows(self) -> list[Row]:
        """Builds and checks every contestant, then times them turn by turn."""
        ready: dict[str, Built] = {}
        ended: dict[str, Row] = {}
        peaks: dict[str, int | None] = {}
        for contestant in self.contestants:
            built, peak, outcome, reason = self._prepared(contestant)
            if built is None:
                ended[contestant.name] = self._row(contestant, outcome=outcome, reason=reason, peak_bytes=peak)
            else:
                ready[contestant.name], peaks[contestant.name] = built, peak
        samples = self._turns(ready)
        for contestant in self.contestants:
            if contestant.name in ready:
                seconds = samples[contestant.name]
                if isinstance(seconds, tuple):
                    ended[contestant.name] = self._row(contestant, outcome=seconds[0], reason=seconds[1])
                else:
                    built, peak = ready[contestant.name], peaks[contestant.name]
                    ended[contestant.name] = self._timed(contestant, built, seconds, peak)
        return [ended[contestant.name] for contestant in self.contestants]

    def _prepared(self, contestant: Contestant) -> tuple[Built | None, int | None, str, str | None]:
        device = self.clock.device
        forget_memory(device)
        before = allocated(device)
        began = default_timer()
        try:
            built = contestant.build()
            built.call()
            self.clock.synchronize()
            if self.reference is not None:
                built.notes["relative_error"] = relative_error(built.results, self.reference)
        except Exception as error:
            return None, None, *what_ended(error)
        peak = None if before is None else torch.cuda.max_memory_allocated(device) - before
        built.results = None
        built.notes["setup_seconds"] = round(default_timer() - began, 2)
        return built, peak, "complete", None

    def _turns(self, ready: dict[str, Built]) -> dict[str, Any]:
        """Seconds of every repeat, or (outcome, reason) of a contestant that ended while it was timed."""
        samples: dict[str, Any] = {name: [] for name in ready}
        plans: dict[str, Plan] = {}
        for name, built in ready.items():
            try:
                plans[name] = self.clock.plan(built)
            except Exception as error:
                samples[name] = what_ended(error)
        cost = sum(plan.cost for plan in plans.values())
        rounds = min(MOST, max(FEWEST, int(self.conditions.seconds / cost))) if plans else 0
        for number in range(rounds):
            for name in list(plans)[:: -1 if number % 2 else 1]:
                try:
                    samples[name].append(self.clock(ready[name], plans[name]))
                except Exception as error:
                    samples[name] = what_ended(error)
                    del plans[name]
        return samples

    def _timed(self, contestant: Contestant, built: Built, seconds: list[float], peak: int | None) -> Row:
        median = statistics.median(seconds)
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        return self._row(
            contestant,
            median=median * 1e3,
            low=deciles[0] * 1e3,
            high=deciles[-1] * 1e3,
            repeats=len(seconds),
            peak_bytes=peak,
            rate=None if self.amount is None else self.amount / median,
            rate_unit=self.rate_unit,
            share=self.share(median),
            share_of=self.share_of,
            notes=built.notes,
        )

    def _row(self, contestant: Contestant, **fields: Any) -> Row:
        cell = self.cell
        return Row(cell.row, cell.group, cell.work, cell.settings, contestant.name, contestant.ours, **fields)


@dataclass(frozen=True)
class Plan:
    """How one repeat of a contestant is taken, and the seconds that it needs in all."""

    calls: int
    flushes: int
    cost: float


class Clock:
    """Seconds of one call on a device: by CUDA events on a GPU, by the wall clock elsewhere."""

    REPEAT_SECONDS = 0.05
    """Length of a repeat of calls that run back to back."""

    def __init__(self, device: torch.device, alone: bool):
        self.device, self.alone, self.cuda = device, alone, device.type == "cuda"
        self.buffer = torch.empty(FLUSH_BYTES if self.cuda and alone else 0, dtype=torch.uint8, device=device)

    def plan(self, built: Built) -> Plan:
        """Warms up, and finds out how many calls make a repeat and how many writes hide what the host does."""
        for _ in range(2):
            built.call()
        self.synchronize()
        began = default_timer()
        built.call()
        issued = default_timer() - began
        self.synchronize()
        took = default_timer() - began
        if not self.alone:
            many = self.cuda and built.reset is None
            calls = max(1, math.ceil(self.REPEAT_SECONDS / took)) if many else 1
            return Plan(calls, 0, calls * took)
        if not self.cuda:
            return Plan(1, 0, took)
        flush = statistics.median(self._events(Built(self.buffer.zero_), 1, 0) for _ in range(3))
        flushes = 1 + math.ceil(1.5 * issued / flush)
        return Plan(1, flushes, flushes * flush + took)

    def __call__(self, built: Built, plan: Plan) -> float:
        """Seconds of one call, the mean of a repeat's calls."""
        if self.cuda:
            return self._events(built, plan.calls, plan.flushes)
        if built.reset is not None:
            built.reset()
        began = default_timer()
        for _ in range(plan.calls):
            built.run()
        return (default_timer() - began) / plan.calls

    def _events(self, built: Built, calls: int, flushes: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)  # that of the current device is another, with cuda:1
        if built.reset is not None:
            built.reset()
        self.synchronize()
        for _ in range(flushes):
            self.buffer.zero_()
        begin.record(stream)
        for _ in range(calls):
            built.run()
        end.record(stream)
        self.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def allocated(device: torch.device) -> int | None:
    """Bytes of tensors on the device at present, None off CUDA."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def what_ended(error: Exception) -> tuple[str, str]:
    """Outcome and reason of a contestant that could not do the work."""
    if isinstance(error, Absent | ImportError):
        return "absent", str(error)
    if reason := out_of_memory_reason(error):
        return "out of memory", reason
    traceback.print_exception(error)
    return "failed", f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def relative_error(results: Any, reference: Any) -> float:
    """Largest of norm(result - reference) / norm(reference); infinite for a result that is not finite."""
    if isinstance(reference, Tensor):
        results, reference = (results,), (reference,)
    worst = 0.0
    for got, wanted in zip(results, reference, strict=True):
        wanted = wanted.double()
        error = ((got.double() - wanted).norm() / wanted.norm()).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def compiled(function: Callable, conditions: Conditions) -> Callable:
    """torch.compile for these very shapes; at toy sizes the function as it is, since compiling takes seconds."""
    return function if conditions.toy else torch.compile(function, dynamic=False)


def captured(step: Callable[[], Any], device: torch.device, warmups: int = 3) -> tuple[Callable[[], Any], list]:
    """The step as one CUDA graph, and what it returned while it warmed up. Raises `Absent` off CUDA."""
    if device.type != "cuda":
        raise Absent("CUDA graphs need a CUDA device.")
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            returned = [step() for _ in range(warmups)]
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # its own default is of the first device that captured
            step()

    def replay(kept: Callable[[], Any] = step) -> None:  # the graph itself keeps no hold on the tensors it works on
        graph.replay()

    return replay, returned
