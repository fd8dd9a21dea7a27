"""The Triton kernel of `lmcore.kernels.cross_entropy`: a row's softmax, loss and gradient, in place."""

import triton
import triton.language as tl
from torch import Tensor

LANES, WIDE, WARPS = 1024, 8, 32
"""Running maxima of a program, neighbouring columns that feed each, and warps.

A program per row of logits, large enough for few rows to be on the way at once: the second reading then finds them in
the caches.
"""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e38)  # rather than -inf, whose difference with itself is no number


@triton.jit
def softmax_kernel(
    logits, targets, losses, num_rows, columns, stride, scale,
    GRADIENT: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program i: row i. Every lane keeps the maximum and the sum of its own columns until the row is read."""
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * stride
    target = tl.load(targets + i)
    lanes = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, num_rows, LANES * WIDE):
        at = start + lanes
        x = tl.load(row + at, mask=at < columns, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.where(at < num_rows, x, LOWEST)
        new = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp2((top - new) * LOG2_E) + tl.sum(tl.exp2((x - new[:, None]) * LOG2_E), 1)
        top = new
    highest = tl.max(top, 0)
    sum_of_all = tl.sum(total * tl.exp2((top - highest) * LOG2_E), 0)
    known = (target >= 0) & (target < num_rows)
    x_target = tl.load(row + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses + i, tl.log2(sum_of_all) * LN_2 - (x_target - highest))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read its target before any overwrites it
        factor = scale / sum_of_all
        for start in range(0, columns, LANES * WIDE):
            at = start + lanes
            x = tl.load(row + at, mask=at < columns, other=0.0, eviction_policy="evict_first").to(tl.float32)
            p = tl.exp2((tl.where(at < num_rows, x, LOWEST) - highest) * LOG2_E)
            gradient = p * factor - tl.where(at == target, scale, 0.0)
            tl.store(row + at, gradient.to(logits.dtype.element_ty), mask=at < columns)


def softmax_gradient(logits: Tensor, targets: Tensor, losses: Tensor, num_rows: int, scale: float | None) -> None:
    """As `lmcore.kernels.cross_entropy.softmax_gradient`; a target outside of the vocabulary makes its loss NaN."""
    n, columns = logits.shape
    softmax_kernel[(n,)](
        logits, targets, losses, num_rows, columns, logits.stride(0), scale or 0.0,
        GRADIENT=scale is not None, LANES=LANES, WIDE=WIDE, num_warps=WARPS,
    )  # fmt: skip
