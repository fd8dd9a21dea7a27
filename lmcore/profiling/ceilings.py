"""What a device can do at best, by measurement: a large matrix product, and a large copy (the roofline's two roofs)."""

import math
import statistics
from collections.abc import Callable
from timeit import default_timer
from typing import Any

import torch

from lmcore.device import autocast, set_matmul_precision

MATMUL_SIZE = {"cuda": 8192, "mps": 2048, "cpu": 1024}
"""Rows and columns of the square matrices by kind of device: large enough to keep it busy, done in under a second."""

COPY_BYTES = {"cuda": 1 << 30, "mps": 1 << 28, "cpu": 1 << 27}
"""Bytes of the tensor that is copied: far more than caches hold."""

FLUSH_BYTES = 1 << 28
"""Written between measurements on a GPU, so that a measurement finds its inputs in the memory and not in the cache."""

BUDGET = {"cuda": 0.2, "mps": 0.2, "cpu": 0.1}
"""Seconds that the repetitions of one measurement may take together, beyond the first `LEAST`."""

LEAST, MOST = 3, 50
"""Repetitions of one measurement."""


class Timer:
    """Seconds that a function keeps a device busy, and seconds that the host needs to hand it the work.

    On a GPU, the host first queues writes that take longer than it needs to queue the function: the kernels then run
    back to back, and CUDA events around them see the GPU's time and no waiting for the host. The writes also drive
    the inputs out of the cache. Elsewhere the wall clock is used, and inputs that fit into the cache stay there.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
            self.flush_seconds = statistics.median(self._once(self.buffer.zero_, 0)[0] for _ in range(5))

    def __call__(self, function: Callable[[], Any]) -> tuple[float, float | None]:
        """Median (seconds, issue_seconds) of several calls after one to warm up; issue_seconds is None off CUDA."""
        function()
        self._synchronize()
        _, issue = self._once(function, int(self.cuda))
        flushes = math.ceil(1.5 * issue / self.flush_seconds) if self.cuda else 0
        taken, began = [], default_timer()
        while len(taken) < LEAST or (len(taken) < MOST and default_timer() - began < BUDGET[self.device.type]):
            taken.append(self._once(function, flushes))
        seconds, issue = map(statistics.median, zip(*taken, strict=True))
        return seconds, issue if self.cuda else None

    def _once(self, function: Callable[[], Any], flushes: int) -> tuple[float, float]:
        self._synchronize()
        for _ in range(flushes):
            self.buffer.zero_()
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self.device)
            begin.record(stream)
        began = default_timer()
        function()
        issued = default_timer() - began
        if self.cuda:
            end.record(stream)
        self._synchronize()
        return (begin.elapsed_time(end) / 1e3 if self.cuda else default_timer() - began), issued

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def matmul_ceiling(device: torch.device, precision: str, timer: Timer) -> float:
    """FLOP/s of a large square matrix product in `precision`, of its own kind of matrices: no casts are timed."""
    set_matmul_precision(device, precision)
    size = MATMUL_SIZE[device.type]
    with autocast(device, precision):
        dtype = torch.get_autocast_dtype(device.type) if precision in ("bf16", "fp16") else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / timer(lambda: torch.mm(a, b, out=out))[0]


def copy_ceiling(device: torch.device, timer: Timer) -> float:
    """Bytes per second of a large copy, those read and those written counted."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timer(lambda: target.copy_(source))[0]


def ceilings(device: torch.device, precision: str) -> dict[str, float]:
    """Measured roofs: `peak_flops_per_second` of `precision`, and `peak_bytes_per_second`."""
    timer = Timer(device)
    return {
        "peak_flops_per_second": matmul_ceiling(device, precision, timer),
        "peak_bytes_per_second": copy_ceiling(device, timer),
    }
