"""Time, memory and errors of a kernel's work."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.device import reset_peak_memory, select_device, set_matmul_precision
from lmcore.profiling.memory.recording import record_cpu
from lmcore.profiling.memory.timeline import levels
from lmcore.profiling.peak_rates import peak_rates
from lmcore.profiling.timing import Timer
from lmcore.profiling.workload import WorkloadConfig

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of activations by precision."""

FEWEST, USUAL, MOST = 7, 50, 200
"""Turns of one contestant; calls that run back to back make a turn of that part of the time."""


def in_turns(
    contestants: Mapping[str, tuple[Callable[[], Any], Callable[[], Any] | None]],
    timer: Timer,
    seconds: float,
    alone: bool = True,
) -> dict[str, list[float]]:
    """Seconds of a call of each contestant (the call, and what goes untimed before every one, or None), turn by turn.

    They take turns, so that what else the machine does falls on all of them, and every round has the opposite order;
    all rounds together take about `seconds`. `alone` times each call by itself behind writes that empty the cache and
    cover the host's work, which is what a kernel takes; otherwise calls run back to back, as the steps of a training
    run do, launches included.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    calls, flushes, cost = {}, {}, 0.0
    for name, (run, reset) in contestants.items():
        timer.once(run, 0, reset)
        took, issue = timer.once(run, int(alone and timer.cuda), reset)
        flushes[name] = timer.flushes_for(issue) if alone else 0
        calls[name] = 1 if alone or reset else max(1, math.ceil(seconds / USUAL / took))
        cost += calls[name] * took + (flushes[name] * timer.flush_seconds if timer.cuda else 0)
    for number in range(min(MOST, max(FEWEST, int(seconds / cost))) if contestants else 0):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            run, reset = contestants[name]
            took, _, flushes[name] = timer.covered(partial(repeat, run, calls[name]), flushes[name], reset)
            taken[name].append(took / calls[name])
    return taken


def repeat(function: Callable[[], Any], times: int) -> None:
    """Calls back to back."""
    for _ in range(times):
        function()


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


def call_bytes(function: Callable[[], Any], device: torch.device) -> tuple[int | None, int | None]:
    """The most memory that a call takes at a time, beside what was there before, and what its result holds of it.

    On a GPU by the allocator's counters, else by the CPU allocator's events; None where nobody counts it (MPS).
    """
    function()  # compilation and workspaces are not the function's own
    if device.type == "cuda":
        before = allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        most, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return most - before, held - before
    if device.type != "cpu":
        return None, None
    alive = levels(record_cpu(lambda span: function(), sources=False)).sum(axis=1)
    return int(alive.max() - alive[0]), int(alive.iloc[-1] - alive[0])


def measured(function: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Median `seconds` that a call keeps the device busy, and its `extra_bytes` by `call_bytes`."""
    extra_bytes, _ = call_bytes(function, device)  # before the timer takes its buffer
    return {"seconds": Timer(device)(function)[0], "extra_bytes": extra_bytes}


def device_peak_rates(config: WorkloadConfig, folder: Path) -> dict[str, float]:
    """`peak_rates` of the case's precision: a task of `lmcore.profiling.runner.run_cases`."""
    return peak_rates(select_device(config.device)[0], config.precision)
