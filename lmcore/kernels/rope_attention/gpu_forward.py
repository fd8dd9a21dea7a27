"""RoPE and causal attention of short sequences, one program a head; and how a tile of a head is read and written.

Keys and values of a head stay in shared memory once they are read, so that queries, keys and values come from memory
once for RoPE and attention together.
"""

import triton
import triton.language as tl

from lmcore.kernels.rope.gpu import load_angles, turned

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def rows_of_head(pointer, stride_b, stride_h, stride_t, bh, heads, rows, D: tl.constexpr):
    """Pointers to rows of one head, whose offsets within the head fit 32 bits."""
    head = pointer + (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    return head + (rows[:, None] * stride_t + tl.arange(0, D)[None, :])


@triton.jit
def load_rows(pointer, stride_b, stride_h, stride_t, bh, heads, rows, T, SIZE: tl.constexpr, D: tl.constexpr,
              WHOLE: tl.constexpr):
    """Rows of one head, zeros where there is nothing; WHOLE: no row is behind the last."""
    at = rows_of_head(pointer, stride_b, stride_h, stride_t, bh, heads, rows, D)
    if WHOLE and SIZE == D:
        return tl.load(at)
    return tl.load(at, mask=(rows[:, None] < T) & (tl.arange(0, D)[None, :] < SIZE), other=0.0)


@triton.jit
def store_rows(pointer, stride_b, stride_h, stride_t, bh, heads, rows, T, value, SIZE: tl.constexpr, D: tl.constexpr):
    """Stores rows of one head in the tensor's own type."""
    at = rows_of_head(pointer, stride_b, stride_h, stride_t, bh, heads, rows, D)
    tl.store(at, value.to(pointer.dtype.element_ty), mask=(rows[:, None] < T) & (tl.arange(0, D)[None, :] < SIZE))


@triton.jit
def attend_from_start(q, keys, values, rows, scale, i: tl.constexpr, PRECISION: tl.constexpr):
    """Output and log-sum-exp in base 2 of queries, of which the last may see all of `i` + 1 tiles of keys."""
    s = tl.dot(q, tl.trans(keys[0]), input_precision=PRECISION)
    if i == 0:
        s = tl.where(rows[None, :] <= rows[:, None], s, float("-inf"))
    top = tl.max(s, 1) * scale
    p = tl.exp2(s * scale - top[:, None])
    total = tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), values[0], input_precision=PRECISION)
    for j in tl.static_range(1, i + 1):
        s = tl.dot(q, tl.trans(keys[j]), input_precision=PRECISION)
        if i == j:
            s = tl.where(rows[None, :] <= rows[:, None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), values[j], acc * shrink[:, None], input_precision=PRECISION)
        top = new
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def head_forward_kernel(q, k, v, o, lse, cos, sin, x_b, x_h, x_t, o_b, o_h, o_t, heads, T, scale, M: tl.constexpr,
                        TILES: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
                        WHOLE: tl.constexpr):
    """Turns queries and keys of one head of at most M * TILES positions in place, and computes its attention.

    WHOLE: of exactly so many.
    """
    bh = tl.program_id(0)
    keys = ()
    values = ()
    for i in tl.static_range(TILES):
        rows = i * M + tl.arange(0, M)
        k_i = load_rows(k, x_b, x_h, x_t, bh, heads, rows, T, SIZE, D, WHOLE)
        v_i = load_rows(v, x_b, x_h, x_t, bh, heads, rows, T, SIZE, D, WHOLE)
        q_i = load_rows(q, x_b, x_h, x_t, bh, heads, rows, T, SIZE, D, WHOLE)
        c = load_angles(cos, rows, T, SIZE, D, WHOLE)
        s = load_angles(sin, rows, T, SIZE, D, WHOLE)
        k_i = turned(k_i, c, s, M, D)
        q_i = turned(q_i, c, s, M, D)
        store_rows(k, x_b, x_h, x_t, bh, heads, rows, T, k_i, SIZE, D)
        store_rows(q, x_b, x_h, x_t, bh, heads, rows, T, q_i, SIZE, D)
        keys = keys + (k_i,)  # noqa: RUF005
        values = values + (v_i,)  # noqa: RUF005
        o_i, lse_i = attend_from_start(q_i, keys, values, rows, scale, i, PRECISION)
        store_rows(o, o_b, o_h, o_t, bh, heads, rows, T, o_i, SIZE, D)
        tl.store(lse + bh.to(tl.int64) * T + rows, lse_i, mask=rows < T)
