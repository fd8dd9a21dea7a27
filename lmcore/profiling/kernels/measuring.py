"""Time, memory and errors of contestants for the same work: the one place where kernels are timed.

Contestants take turns, so that what else the machine does falls on all of them.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from timeit import default_timer
from typing import Any

import torch
from torch import Tensor

from lmcore.device import out_of_memory_reason, reset_peak_memory, select_device, set_matmul_precision
from lmcore.errors import UserError
from lmcore.profiling.memory.recording import record_cpu
from lmcore.profiling.memory.timeline import levels
from lmcore.profiling.peak_rates import peak_rates
from lmcore.profiling.timing import Timer
from lmcore.profiling.workload import WorkloadConfig

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of activations by precision."""

FEWEST, USUAL, MOST = 7, 50, 200
"""Turns of one contestant; calls that run back to back make a turn of that part of the time."""


class Absent(Exception):
    """A contestant that this machine or its software does not have; the message says why."""


@dataclass
class Contestant:
    """Someone who is ready to do the work: inputs are made, code is compiled."""

    run: Callable[[], Any]
    reset: Callable[[], Any] | None = None
    """Called, untimed, before every call of a contestant that works in place or continues from somewhere."""
    results: Sequence[Tensor] | None = None
    """What is held against the reference; None: what the first call returns."""
    notes: dict[str, Any] = field(default_factory=dict)

    def call(self) -> Any:
        """One call, on fresh inputs where it matters."""
        if self.reset is not None:
            self.reset()
        return self.run()

    def repeat(self, calls: int) -> None:
        """Calls back to back."""
        for _ in range(calls):
            self.run()


@dataclass
class Result:
    """How one contestant did."""

    outcome: str = "complete"
    """Or "absent", "out of memory", "failed", with the `reason`."""
    reason: str | None = None
    seconds: list[float] = field(default_factory=list)
    """Of one call, turn by turn; the mean of the turn's `calls`."""
    calls: int = 1
    peak_bytes: int | None = None
    """Device memory that the contestant needed at most beyond what was there before; None off CUDA."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Those of the contestant; `setup_seconds`, and `relative_error` where there is a reference."""

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """An error inside is the outcome of this contestant and does not stop the others."""
        try:
            yield
        except Exception as error:
            self.outcome, self.reason, self.seconds = "failed", None, []
            if isinstance(error, Absent | ImportError | UserError):
                self.outcome, self.reason = "absent", str(error)
            elif (reason := out_of_memory_reason(error)) is not None:
                self.outcome, self.reason = "out of memory", reason
            else:
                traceback.print_exception(error)
                self.reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def race(
    builders: Mapping[str, Callable[[], Contestant]],
    device: torch.device,
    seconds: float,
    alone: bool = True,
    reference: Sequence[Tensor] | None = None,
    part: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Result]:
    """Builds every contestant, holds `part` of its results against `reference`, and times all in turns.

    Every round takes them in the opposite order. All rounds together take about `seconds`; there are `FEWEST` to
    `MOST`. `alone` times each call by itself behind writes that empty the cache and cover the
    host's work, which is what a kernel takes; otherwise calls run back to back, as the steps of a training run do,
    launches included. An error is the outcome of its contestant and does not stop the others.
    """
    timer, results = Timer(device), {name: Result() for name in builders}
    ready: dict[str, Contestant] = {}
    flushes: dict[str, int] = {}
    cost, turn = 0.0, seconds / USUAL
    for name, build in builders.items():
        with results[name].ending():
            ready[name] = prepared(build, results[name], timer, reference, part)
    for name, contestant in ready.items():
        with results[name].ending():
            contestant.call()
            took, issue = timer.once(contestant.call, int(alone and timer.cuda))
            flushes[name] = timer.flushes_for(issue) if alone else 0
            if not alone and contestant.reset is None:
                results[name].calls = max(1, math.ceil(turn / took))
            cost += results[name].calls * took + (flushes[name] * timer.flush_seconds if timer.cuda else 0)
    for number in range(min(MOST, max(FEWEST, int(seconds / cost))) if flushes else 0):
        for name in list(flushes)[:: -1 if number % 2 else 1]:
            contestant, result = ready[name], results[name]
            with result.ending():
                repeat = partial(contestant.repeat, result.calls)
                took, _, flushes[name] = timer.covered(repeat, flushes[name], contestant.reset)
                result.seconds.append(took / result.calls)
            if result.outcome != "complete":
                del flushes[name]
    return results


def prepared(
    build: Callable[[], Contestant],
    result: Result,
    timer: Timer,
    reference: Sequence[Tensor] | None,
    part: Callable[[Tensor], Tensor],
) -> Contestant:
    """A contestant that has been called once; its peak memory, error and notes are in `result`."""
    began = default_timer()
    before = allocated(timer.device)
    contestant = build()
    found = contestant.call()
    timer.synchronize()
    result.peak_bytes = torch.cuda.max_memory_allocated(timer.device) - before if timer.cuda else None
    result.notes = contestant.notes
    if reference is not None:
        pairs = zip(contestant.results or [part(x) for x in found], reference, strict=True)
        result.notes["relative_error"] = max(relative_error(*pair) for pair in pairs)
    contestant.results = None
    result.notes["setup_seconds"] = round(default_timer() - began, 2)
    return contestant


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| by the l2 norm, in float64; without the divisor if that is 0; inf if not finite."""
    wanted = wanted.double()
    difference = (found.detach().to(wanted.device).double() - wanted).norm().item()
    error = difference / (wanted.norm().item() or 1.0)
    return error if math.isfinite(error) else math.inf


def with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor], *gradients: Tensor) -> tuple[Tensor, ...]:
    """The function's last result, and the gradients of the inputs that require them.

    `gradients` are those of its last results, one for each; none where the result is a scalar.
    """
    result, leaves = function(*inputs), [x for x in inputs if x.requires_grad]
    results = result if isinstance(result, tuple) else (result,)
    if not leaves:
        return results[-1:]
    results = results[-max(1, len(gradients)) :]
    of = [gradient.to(x.dtype) for gradient, x in zip(gradients, results, strict=True)] if gradients else None
    return (results[-1].detach(), *torch.autograd.grad(results, leaves, of))


def begin(config: WorkloadConfig) -> torch.device:
    """The device of a benchmark case, with the case's matmul precision and seed set."""
    device, _ = select_device(config.device)
    set_matmul_precision(device, config.precision)
    torch.manual_seed(config.seed)
    return device


def allocated(device: torch.device) -> int:
    """Bytes allocated on the device, of which new peaks are counted from now on; 0 off CUDA."""
    reset_peak_memory(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def extra_bytes(function: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a call takes at a time, beside what was there before; None where nobody counts it (MPS).

    On a GPU by the allocator's counters, else by the CPU allocator's events; what the call returns is part of it.
    """
    function()  # compilation and workspaces are not the function's own
    if device.type == "cuda":
        before = allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    alive = levels(record_cpu(lambda span: function(), sources=False)).sum(axis=1)
    return int(alive.max() - alive[0])


def measured(function: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Median `seconds` that a call keeps the device busy, and `extra_bytes`."""
    bytes_taken = extra_bytes(function, device)  # before the timer takes its buffer
    return {"seconds": Timer(device)(function)[0], "extra_bytes": bytes_taken}


def device_peak_rates(config: WorkloadConfig, folder: Path) -> dict[str, float]:
    """`peak_rates` of the case's precision: a task of `lmcore.profiling.runner.run_cases`."""
    return peak_rates(select_device(config.device)[0], config.precision)
