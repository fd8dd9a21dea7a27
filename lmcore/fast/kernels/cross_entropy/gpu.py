"""The Triton kernel of `lmcore.fast.kernels.cross_entropy`: a row's softmax, loss and gradient, in place."""

import triton
import triton.language as tl
from torch import Tensor

TUNED = ((32_768, (1024, 32, 2)), (0, (256, 8, 2)))
"""From how many columns on: running maxima of a program, its warps, and blocks of columns per turn of the loop.

A program takes one row. For long rows it is large, so that few of them are on the way at once: the second reading
then finds them in the caches.
"""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e38)  # rather than -inf, whose difference with itself is not a number


@triton.jit
def read(row, at, num_rows, columns, MASKED: tl.constexpr, KEEP: tl.constexpr):
    """Logits in float32, kept in the caches if they will be read again (`KEEP`).

    `MASKED` is for the last columns, where padding counts as the lowest of all.
    """
    policy: tl.constexpr = "evict_last" if KEEP else ""
    if MASKED:
        x = tl.load(row + at, mask=at < columns, other=0.0, eviction_policy=policy).to(tl.float32)
        return tl.where(at < num_rows, x, LOWEST)
    return tl.load(row + at, eviction_policy=policy).to(tl.float32)


@triton.jit
def accumulate(x, top, total):
    """Every lane's maximum, and its sum of exponentials relative to that, with the columns `x` added."""
    new = tl.maximum(top, tl.max(x, 1))
    total = total * tl.exp2((top - new) * LOG2_E) + tl.sum(tl.exp2((x - new[:, None]) * LOG2_E), 1)
    return new, total


@triton.jit
def totals(
    row, lanes, whole, num_rows, columns,
    KEEP: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A row's maximum, and the sum of its exponentials relative to that."""
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, whole, LANES * WIDE, loop_unroll_factor=UNROLL):
        top, total = accumulate(read(row, start + lanes, num_rows, columns, False, KEEP), top, total)
    if whole < num_rows:
        top, total = accumulate(read(row, whole + lanes, num_rows, columns, True, KEEP), top, total)
    highest = tl.max(top, 0)
    return highest, tl.sum(total * tl.exp2((top - highest) * LOG2_E), 0)


@triton.jit
def softmax_kernel(
    logits, targets, losses, num_rows, columns, stride, scale, teacher, teacher_stride, share,
    GRADIENT: tl.constexpr, TEACHER: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Program i: row i. Every lane keeps the maximum and the sum of its own columns until the row is read."""
    i = tl.program_id(0).to(tl.int64)
    row, teacher_row = logits + i * stride, teacher + i * teacher_stride
    target = tl.load(targets + i)
    known = (target >= 0) & (target < num_rows)
    x_target = tl.load(row + target, mask=known, other=float("nan")).to(tl.float32)
    lanes = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    whole = num_rows // (LANES * WIDE) * (LANES * WIDE)  # columns in blocks that need no mask
    highest, sum_of_all = totals(row, lanes, whole, num_rows, columns, GRADIENT, LANES, WIDE, UNROLL)
    tl.store(losses + i, tl.log2(sum_of_all) * LN_2 - (x_target - highest))
    if GRADIENT:
        factor = scale / sum_of_all
        if TEACHER:
            teacher_max, teacher_sum = totals(teacher_row, lanes, whole, num_rows, num_rows, True, LANES, WIDE, UNROLL)
            teacher_factor = scale * share / teacher_sum
        for start in tl.range(0, whole, LANES * WIDE, loop_unroll_factor=UNROLL):
            p = tl.exp2((read(row, start + lanes, num_rows, columns, False, False) - highest) * LOG2_E) * factor
            if TEACHER:
                x = read(teacher_row, start + lanes, num_rows, num_rows, False, False)
                p -= tl.exp2((x - teacher_max) * LOG2_E) * teacher_factor
            tl.store(row + start + lanes, p.to(logits.dtype.element_ty))
        for start in range(whole, columns, LANES * WIDE):
            at = start + lanes
            p = tl.exp2((read(row, at, num_rows, columns, True, False) - highest) * LOG2_E) * factor
            if TEACHER:
                x = read(teacher_row, at, num_rows, num_rows, True, False)
                p -= tl.exp2((x - teacher_max) * LOG2_E) * teacher_factor
            tl.store(row + at, p.to(logits.dtype.element_ty), mask=at < columns)
        tl.debug_barrier()  # the target's column is written once more
        gradient = tl.exp2((x_target - highest) * LOG2_E) * factor - scale * (1 - share)
        if TEACHER:
            x = tl.load(teacher_row + target, mask=known, other=0.0).to(tl.float32)
            gradient -= tl.exp2((x - teacher_max) * LOG2_E) * teacher_factor
        tl.store(row + target, gradient.to(logits.dtype.element_ty), mask=known)


def softmax_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, num_rows: int, scale: float | None,
    teacher: Tensor | None = None, share: float = 0.0,
) -> None:  # fmt: skip
    """As the package's `softmax_gradient`; a target outside of the vocabulary makes its loss NaN."""
    n, columns = logits.shape
    lanes, warps, unroll = next(tuned for least, tuned in TUNED if columns >= least)
    softmax_kernel[(n,)](
        logits, targets, losses, num_rows, columns, logits.stride(0), scale or 0.0,
        *((logits, 0, 0.0) if teacher is None else (teacher, teacher.stride(0), share)),
        GRADIENT=scale is not None, TEACHER=teacher is not None, LANES=lanes, WIDE=8, UNROLL=unroll, num_warps=warps,
    )  # fmt: skip
