"""Exercises of notebooks 04 to 06: timing, precision, profiles and memory."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbook.exercises.exercise import normal


class _Device:
    """A clock, and a device behind it: a step is queued in 1 ms and takes 10, the first two take 50."""

    def __init__(self) -> None:
        self.now, self.done, self.steps = 0.0, 0.0, 0

    def step(self) -> None:
        self.now += 0.001
        self.done = max(self.done, self.now) + (0.05 if self.steps < 2 else 0.01)
        self.steps += 1

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        return self.now


def _on_a_device(solution: Callable, warmup: int, steps: int) -> list[float]:
    device = _Device()
    return solution(device.step, device.synchronize, device.clock, warmup, steps)


def time_steps(step: Callable, synchronize: Callable, clock: Callable, warmup: int, steps: int) -> list[float]:
    """Seconds of each of `steps` steps after `warmup` others; `synchronize` waits for the device."""
    for _ in range(warmup):
        step()
    synchronize()
    times = []
    for _ in range(steps):
        begin = clock()
        step()
        synchronize()  # until the step is over
        times.append(clock() - begin)
    return times


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """The median, and from the fastest to the slowest."""
    return statistics.median(times), max(times) - min(times)


def accumulate(values: Tensor) -> float:
    """The sum of float16 values, one after the other, kept in float32."""
    total = torch.zeros((), dtype=torch.float32)
    for value in values:
        total = total + value.to(total.dtype)
    return total.item()


def mfu(tokens_per_second: float, parameters: float, peak: float) -> float:
    """The share of the peak, in FLOP/s, that training reaches."""
    return 6 * parameters * tokens_per_second / peak


def roofline(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """The least seconds for so many FLOPs and bytes moved, with `peak` FLOP/s and `bandwidth` bytes/s."""
    return max(flops / peak, moved / bandwidth)


RANGES = [("step", 0, 100), ("forward", 1, 20), ("attention", 5, 12), ("backward", 21, 60)]


def range_of(kernel: tuple[int, int], ranges: list[tuple[str, int, int]]) -> str:
    """Name of the innermost range, (name, begin, end), that is open when a kernel, (launched, started), is launched."""
    around = [name for name, begin, end in ranges if begin <= kernel[0] <= end]
    return around[-1]


def busy_time(kernels: list[tuple[float, float]]) -> float:
    """Time in which at least one kernel, (begin, end), runs."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(kernels):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


def peak_of(events: list[int]) -> int:
    """Most bytes at a time; positive events allocate, negative ones free."""
    level, peak = 0, 0
    for event in events:
        level += event
        peak = max(peak, level)
    return peak


def training_bytes(parameters: int) -> int:
    """Bytes of weights, gradients and AdamW's moments in float32."""
    return 16 * parameters


def _blocks() -> list[nn.Module]:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    for layer in layers:
        layer.load_state_dict({"weight": normal(4, 4), "bias": normal(4)})
    return [nn.Sequential(layer, nn.Tanh()) for layer in layers]


def _kept(solution: Callable, blocks: list[nn.Module], x: Tensor, every: int) -> dict[str, Any]:
    """The result, the gradient of x, and how many numbers were kept for the backward pass."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(0 if isinstance(tensor, nn.Parameter) else tensor.numel())
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = solution(blocks, x, every)
    y.sum().backward()
    return {"result": y.detach(), "gradient": x.grad, "numbers kept": sum(kept)}


def checkpointed(blocks: list[nn.Module], x: Tensor, every: int) -> Tensor:
    """The blocks one after the other; of each `every` only the input is kept for the backward pass."""
    for first in range(0, len(blocks), every):
        x = checkpoint(nn.Sequential(*blocks[first : first + every]), x, use_reentrant=False)
    return x
