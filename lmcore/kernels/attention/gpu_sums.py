"""What the backward pass of attention on Hopper needs around it: delta and zeros before, dQ from its sums after.

Where RoPE has turned queries and keys, dQ and dK are turned back on the way.
"""

import triton
import triton.language as tl

from lmcore.kernels.rope.gpu import turned_back

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def attention_prepare_kernel(o, do, delta, sums, counter, o_b, o_h, o_t, do_b, do_h, do_t, heads, length, lse_rows,
                             SIZE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """delta = sum over features of dO · O (Dao 2023, algorithm 2, line 4), and zeros: sums of dQ, counter."""
    if tl.program_id(0) == 0:
        tl.store(counter, 0)
    blocks = tl.cdiv(lse_rows, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.arange(0, D)
    inside = (rows[:, None] < length) & (d[None, :] < SIZE)
    at = bh // heads * o_b + bh % heads * o_h + rows[:, None].to(tl.int64) * o_t + d[None, :]
    left = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    at = bh // heads * do_b + bh % heads * do_h + rows[:, None].to(tl.int64) * do_t + d[None, :]
    right = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + bh * lse_rows + rows, tl.sum(left * right, 1))
    tl.store(sums + (bh * length + rows[:, None]) * SIZE + d[None, :], tl.zeros([ROWS, D], tl.float32), mask=inside)


@triton.jit
def attention_finish_kernel(sums, dq, dk, cos, sin, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, heads, length, scale,
                            SIZE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr):
    """dQ from the sums of its parts; TURNED: dQ and dK are turned back, dK in place."""
    blocks = tl.cdiv(length, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.arange(0, D)
    inside = (rows[:, None] < length) & (d[None, :] < SIZE)
    value = tl.load(sums + (bh * length + rows[:, None]) * SIZE + d[None, :], mask=inside, other=0.0) * scale
    if TURNED:
        value = turned_back(value, cos, sin, rows, length, ROWS, SIZE, D, False)
        at = bh // heads * dk_b + bh % heads * dk_h + rows[:, None].to(tl.int64) * dk_t + d[None, :]
        key = tl.load(dk + at, mask=inside, other=0.0)
        tl.store(dk + at, turned_back(key, cos, sin, rows, length, ROWS, SIZE, D, False), mask=inside)
    at = bh // heads * dq_b + bh % heads * dq_h + rows[:, None].to(tl.int64) * dq_t + d[None, :]
    tl.store(dq + at, value.to(dq.dtype.element_ty), mask=inside)
