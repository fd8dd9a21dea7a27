"""Exercises of notebooks 04 to 06: timing, precision, profiles and memory."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbook.exercises.exercise import exercise, normal

timing = partial(exercise, notebook="04_benchmark")
profile = partial(exercise, notebook="05_nsys")
memory = partial(exercise, notebook="06_memory")


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


def time_steps(step: Callable, synchronize: Callable, clock: Callable, warmup: int, steps: int, **slip: Any) -> list:
    """Seconds of each of `steps` steps after `warmup` others."""
    for _ in range(warmup if slip.get("warm", True) else 0):
        step()
    if slip.get("before", True):
        synchronize()
    times = []
    for _ in range(steps):
        begin = clock()
        step()
        if slip.get("waits", True):
            synchronize()
        times.append(clock() - begin)
    return times


def _on_a_device(solution: Callable, warmup: int, steps: int) -> list[float]:
    device = _Device()
    return solution(device.step, device.synchronize, device.clock, warmup, steps)


timing(
    "time_steps",
    time_steps,
    [(2, 3), (5, 2)],
    mistakes={
        "Only the launch is timed: a GPU is still at work when the call returns.": partial(time_steps, waits=False),
        "The first steps are slower; they should be over before the clock runs.": partial(time_steps, warm=False),
        "The first time has the warm-up's work in it.": partial(time_steps, before=False),
    },
    use=_on_a_device,
)
timing(
    "median_and_spread",
    lambda times: (statistics.median(times), max(times) - min(times)),
    [([3.0, 1.0, 2.0],), ([1.0, 2.0, 4.0, 9.0],)],
    mistakes={
        "This is the mean, which one slow step moves.": lambda times: (statistics.mean(times), max(times) - min(times)),
        "The spread is from the fastest to the slowest.": lambda times: (statistics.median(times), max(times)),
    },
)


def accumulate(values: Tensor, total: torch.dtype = torch.float32, term: torch.dtype | None = None) -> float:
    """The sum, one after the other, kept in float32."""
    s = torch.zeros((), dtype=total)
    for value in values:
        s = s + (value if term is None else value.to(term)).to(total)
    return s.item()


timing(
    "accumulate",
    lambda values: accumulate(values),
    lambda: [(torch.full((1000,), 0.01, dtype=torch.float16),), (torch.full((300,), 10.0, dtype=torch.float16),)],
    mistakes={
        "Digits are lost: in which precision is the sum kept?": partial(accumulate, total=torch.float16),
        "bfloat16 has fewer digits than float16.": partial(accumulate, term=torch.bfloat16),
    },
    avoid=("sum",),
)
timing(
    "mfu",
    lambda tokens_per_second, parameters, peak: 6 * parameters * tokens_per_second / peak,
    [(1e6, 17e6, 1e15), (5e4, 1e9, 5e14)],
    mistakes={
        "The backward pass takes twice the FLOPs of the forward pass.": lambda t, n, peak: 2 * n * t / peak,
        "A multiply-add is two operations.": lambda t, n, peak: 3 * n * t / peak,
        "The share is upside down.": lambda t, n, peak: peak / (6 * n * t),
    },
)
timing(
    "roofline",
    lambda flops, moved, peak, bandwidth: max(flops / peak, moved / bandwidth),
    [(1e12, 1e9, 1e15, 3e12), (1e9, 1e9, 1e15, 3e12)],
    mistakes={
        "Both happen at once: the slower one decides.": lambda f, m, peak, bandwidth: f / peak + m / bandwidth,
        "The faster of the two cannot be the bound.": lambda f, m, peak, bandwidth: min(f / peak, m / bandwidth),
    },
)
timing(
    "matmul_intensity",
    4096 / 3,
    mistakes={
        "It is half of what it should be: a multiply-add is two operations, and bfloat16 has two bytes.": 4096 / 6,
        "Two matrices are read, and one is written.": 4096 / 2,
    },
    tolerance=1e-3,
)

RANGES = [("step", 0, 100), ("forward", 1, 20), ("attention", 5, 12), ("backward", 21, 60)]


def range_of(kernel: tuple[int, int], ranges: list[tuple], inner: bool = True, at: int = 0) -> str:
    """Name of the innermost range that is open when a kernel, (launched, started), is launched."""
    around = [name for name, begin, end in ranges if begin <= kernel[at] <= end]
    return around[-1 if inner else 0]


profile(
    "range_of",
    lambda kernel, ranges: range_of(kernel, ranges),
    [(kernel, RANGES) for kernel in ((2, 4), (6, 15), (10, 30), (25, 62), (40, 80))],
    mistakes={
        "The GPU lags: which range was open when the kernel was launched?": partial(range_of, at=1),
        "Ranges are nested, and the outermost is always open.": partial(range_of, inner=False),
    },
)


def busy_time(kernels: list[tuple[float, float]]) -> float:
    """Time in which at least one kernel runs."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(kernels):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


profile(
    "busy_time",
    busy_time,
    [([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)],), ([(4.0, 5.0), (0.0, 9.0)],), ([],)],
    mistakes={
        "Kernels of two streams overlap, and are counted twice.": lambda kernels: sum((e - b for b, e in kernels), 0.0),
        "Gaps between kernels count as busy.": lambda kernels: (
            max(e for _, e in kernels) - min(b for b, _ in kernels) if kernels else 0.0
        ),
    },
)
profile(
    "matmuls_to_softmax",
    4 * 64 / 5,
    mistakes={
        "There are two matmuls: the scores, and their sums of values.": 2 * 64 / 5,
        "Softmax takes five operations for each score.": 4 * 64,
    },
    tolerance=1e-3,
)


def peak_of(events: list[int], what: str = "peak") -> int:
    """Most bytes at a time; positive events allocate, negative ones free."""
    level, peak = 0, 0
    for event in events:
        level += event
        peak = max(peak, level)
    return {"peak": peak, "end": level, "all": sum(event for event in events if event > 0)}[what]


memory(
    "peak_of",
    lambda events: peak_of(events),
    [([4, 8, -4, 2, -8],), ([1, -1, 5, -5],), ([],)],
    mistakes={
        "This is what is left at the end.": partial(peak_of, what="end"),
        "What was freed can be used again.": partial(peak_of, what="all"),
        "A peak is a level, not one allocation.": lambda events: max(events, default=0),
    },
)
memory(
    "training_bytes",
    lambda parameters: 16 * parameters,
    [(1,), (10**9,)],
    mistakes={
        "The gradients need memory, too.": lambda parameters: 12 * parameters,
        "This is enough for inference; a step keeps more.": lambda parameters: 4 * parameters,
        "A gradient has no moments in SGD; AdamW keeps two.": lambda parameters: 8 * parameters,
    },
)
memory(
    "residual_mib",
    4 * 128 * 2560 * 4 / 2**20,
    mistakes={
        "The batch has four sequences.": 128 * 2560 * 4 / 2**20,
        "This is in MB of 10^6 bytes; MiB are asked for.": 4 * 128 * 2560 * 4 / 1e6,
        "A float32 has four bytes.": 4 * 128 * 2560 * 2 / 2**20,
    },
    tolerance=1e-3,
)


def _blocks() -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for _ in range(6):
        blocks.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        for p in blocks[-1].parameters():
            p.data = normal(*p.shape)
    return blocks


def checkpointed(blocks: list[nn.Module], x: Tensor, every: int) -> Tensor:
    """The blocks one after the other; of each `every` only the input is kept for the backward pass."""
    for first in range(0, len(blocks), every):
        x = checkpoint(nn.Sequential(*blocks[first : first + every]), x, use_reentrant=False)
    return x


def _kept(solution: Callable, blocks: list[nn.Module], x: Tensor, every: int) -> dict[str, Any]:
    """The result, the gradient of x, and how many numbers were kept for the backward pass."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * (not isinstance(tensor, nn.Parameter))
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = solution(blocks, x, every)
    y.sum().backward()
    return {"result": y.detach(), "gradient": x.grad, "numbers kept": kept}


def _plain(blocks: list[nn.Module], x: Tensor, every: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


memory(
    "checkpointed",
    checkpointed,
    lambda: [(_blocks(), normal(3, 4), every) for every in (2, 3)],
    mistakes={
        "Everything is kept for the backward pass.": _plain,
        "Every block keeps its input, whatever `every` says.": lambda blocks, x, every: checkpointed(blocks, x, 1),
        "No gradient is left: no_grad forgets, checkpointing recomputes.": lambda blocks, x, every: (
            _plain(blocks, x, every).detach() + 0 * x
        ),
    },
    use=_kept,
)
memory(
    "best_segment",
    6,
    mistakes={
        "One block at a time keeps 36 inputs: fewer inputs cost more inside.": 1,
        "All 36 at once are recomputed at once, and kept.": 36,
        "This is the number of segments squared.": 18,
    },
    tolerance=1e-9,
)
