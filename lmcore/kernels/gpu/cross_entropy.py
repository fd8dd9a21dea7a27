"""The Triton kernel of `lmcore.kernels.cross_entropy`: a row's softmax, loss and gradient, in place."""

import triton
import triton.language as tl
from torch import Tensor

LANES, WIDE, WARPS, UNROLL = 512, 8, 16, 1
"""Running maxima of a program, neighbouring columns that feed each, and warps.

A program per row of logits, large enough for few rows to be on the way at once: the second reading then finds them in
the caches.
"""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e38)  # rather than -inf, whose difference with itself is no number


@triton.jit
def read(row, at, num_rows, columns, MASKED: tl.constexpr):
    """Logits in float32; `MASKED` is for the last columns, where padding counts as the lowest of all."""
    if MASKED:
        x = tl.load(row + at, mask=at < columns, other=0.0).to(tl.float32)
        return tl.where(at < num_rows, x, LOWEST)
    return tl.load(row + at).to(tl.float32)


@triton.jit
def accumulate(x, top, total):
    """Every lane's maximum (times log2(e)) and sum of exponentials relative to it, with the columns x added."""
    new = tl.maximum(top, tl.max(x, 1) * LOG2_E)
    # whatever `new` was rounded to, the sum is relative to just that: with x * LOG2_E - new one operation, it is exact
    total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x * LOG2_E - new[:, None]), 1)
    return new, total


@triton.jit
def softmax_kernel(
    logits, targets, losses, num_rows, columns, stride, scale,
    GRADIENT: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Program i: row i. Every lane keeps the maximum and the sum of its own columns until the row is read."""
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * stride
    target = tl.load(targets + i)
    known = (target >= 0) & (target < num_rows)
    x_target = tl.load(row + target, mask=known, other=float("nan")).to(tl.float32)
    lanes = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    whole = num_rows // (LANES * WIDE) * (LANES * WIDE)  # columns in blocks that need no mask
    top = tl.full([LANES], LOWEST * LOG2_E, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, whole, LANES * WIDE, loop_unroll_factor=UNROLL):
        top, total = accumulate(read(row, start + lanes, num_rows, columns, False), top, total)
    if whole < num_rows:
        top, total = accumulate(read(row, whole + lanes, num_rows, columns, True), top, total)
    highest = tl.max(top, 0)
    sum_of_all = tl.sum(total * tl.exp2(top - highest), 0)
    relative = x_target * LOG2_E - highest
    tl.store(losses + i, (tl.log2(sum_of_all) - relative) * LN_2)
    if GRADIENT:
        factor = scale / sum_of_all
        for start in tl.range(0, whole, LANES * WIDE, loop_unroll_factor=UNROLL):
            p = tl.exp2(read(row, start + lanes, num_rows, columns, False) * LOG2_E - highest)
            tl.store(row + start + lanes, (p * factor).to(logits.dtype.element_ty))
        for start in range(whole, columns, LANES * WIDE):
            at = start + lanes
            p = tl.exp2(read(row, at, num_rows, columns, True) * LOG2_E - highest)
            tl.store(row + at, (p * factor).to(logits.dtype.element_ty), mask=at < columns)
        tl.debug_barrier()  # the target's column is written once more
        gradient = tl.exp2(relative) * factor - scale
        tl.store(row + target, gradient.to(logits.dtype.element_ty), mask=known)


def softmax_gradient(logits: Tensor, targets: Tensor, losses: Tensor, num_rows: int, scale: float | None) -> None:
    """As `lmcore.kernels.cross_entropy.softmax_gradient`; a target outside of the vocabulary makes its loss NaN."""
    n, columns = logits.shape
    softmax_kernel[(n,)](
        logits, targets, losses, num_rows, columns, logits.stride(0), scale or 0.0,
        GRADIENT=scale is not None, LANES=LANES, WIDE=WIDE, UNROLL=UNROLL, num_warps=WARPS,
    )  # fmt: skip
