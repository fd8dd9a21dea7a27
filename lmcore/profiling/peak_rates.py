"""What a device can do at best, by measurement: a large matmul, and a large copy (the roofline's two roofs)."""

import torch

from lmcore.device import autocast, set_matmul_precision
from lmcore.profiling.timing import Timer

MATMUL_SIZE = {"cuda": 8192, "mps": 2048, "cpu": 512}
"""Rows and columns of the square matrices by device type: large enough to keep it busy, done in under a second."""

COPY_BYTES = {"cuda": 1 << 30, "mps": 1 << 28, "cpu": 1 << 27}
"""Bytes of the tensor that is copied: far more than caches hold."""


def matmul_rate(device: torch.device, precision: str, timer: Timer) -> float:
    """FLOP/s of a large square matmul in `precision`, of matrices of that type: no casts are timed."""
    set_matmul_precision(device, precision)
    size = MATMUL_SIZE[device.type]
    with autocast(device, precision):
        dtype = torch.get_autocast_dtype(device.type) if precision in ("bf16", "fp16") else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / timer(lambda: torch.mm(a, b, out=out))


def copy_rate(device: torch.device, timer: Timer) -> float:
    """Bytes per second of a large copy, those read and those written counted."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timer(lambda: target.copy_(source))


def peak_rates(device: torch.device, precision: str) -> dict[str, float]:
    """Measured: `peak_flops_per_second` of `precision`, and `peak_bytes_per_second`."""
    timer = Timer(device)
    return {
        "peak_flops_per_second": matmul_rate(device, precision, timer),
        "peak_bytes_per_second": copy_rate(device, timer),
    }
