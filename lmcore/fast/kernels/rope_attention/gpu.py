"""RoPE and causal attention of short sequences by one program a head, forward and backward.

RoPE rotates queries and keys on their way in. Keys and values of a head stay in shared memory once they are read,
so that queries, keys and values come from memory once for RoPE and attention together.

In the backward pass the tiles of dQ stay in registers while those of keys and values pass by, so that scores are
computed once, nothing is added up in memory and the order of all sums is fixed (Dao 2023, algorithm 2, with the loop
over queries unrolled). Gradients of queries and keys are rotated back on their way out.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmcore.fast.kernels.attention.gpu import (
    LOG2_E,
    block_of,
    load_angles,
    operand,
    precision_of,
    rotated,
    rotated_back,
    store_tile,
    tile_of,
)

TILE, WARPS = 64, 4
"""Queries, and keys, of a tile, and warps of a program."""

FORWARD_REGISTERS = 96
"""Of a thread: five programs share a multiprocessor, which by measurement outweighs a few registers spilled."""

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def attend_from_start(q, keys, values, rows, scale, i: tl.constexpr, PRECISION: tl.constexpr):
    """Output and log-sum-exp in base 2 of queries, of which the last may see all of `i` + 1 tiles of keys."""
    s = tl.dot(q, tl.trans(keys[0]), input_precision=PRECISION)
    if i == 0:
        s = tl.where(rows[None, :] <= rows[:, None], s, float("-inf"))
    m_i = tl.max(s, 1) * scale
    p = tl.exp2(s * scale - m_i[:, None])
    l_i = tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), values[0], input_precision=PRECISION)
    for j in tl.static_range(1, i + 1):
        s = tl.dot(q, tl.trans(keys[j]), input_precision=PRECISION)
        if i == j:
            s = tl.where(rows[None, :] <= rows[:, None], s, float("-inf"))
        new = tl.maximum(m_i, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        alpha = tl.exp2(m_i - new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), values[j], acc * alpha[:, None], input_precision=PRECISION)
        m_i = new
    return acc / l_i[:, None], m_i + tl.log2(l_i)


@triton.jit
def head_forward_kernel(q, k, v, o, lse, angles, heads, T, scale, M: tl.constexpr, TILES: tl.constexpr,
                        SIZE: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr):
    """Turns queries and keys of one head of at most M * TILES positions in place, and computes its attention.

    WHOLE: of exactly so many.
    """
    bh = tl.program_id(0)
    head = (bh // heads, bh % heads)
    keys = ()
    values = ()
    for i in tl.static_range(TILES):
        rows = i * M + tl.arange(0, M)
        c = load_angles(angles[0], rows, T, SIZE, D, WHOLE)
        s = load_angles(angles[1], rows, T, SIZE, D, WHOLE)
        k_i = rotated(tile_of(k, head, rows, T, SIZE, D, not WHOLE), c, s, M, D)
        q_i = rotated(tile_of(q, head, rows, T, SIZE, D, not WHOLE), c, s, M, D)
        store_tile(k, head, rows, T, k_i, SIZE, D)
        store_tile(q, head, rows, T, q_i, SIZE, D)
        keys = keys + (k_i,)  # noqa: RUF005
        values = values + (tile_of(v, head, rows, T, SIZE, D, not WHOLE),)  # noqa: RUF005
        o_i, lse_i = attend_from_start(q_i, keys, values, rows, scale, i, PRECISION)
        store_tile(o, head, rows, T, o_i, SIZE, D)
        tl.store(lse + bh.to(tl.int64) * T + rows, lse_i, mask=rows < T)


@triton.jit
def head_gradients_kernel(q, k, v, o, do, dq, dk, dv, lse, angles, heads, T, scale2, scale, M: tl.constexpr,
                          TILES: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
                          WHOLE: tl.constexpr):
    """dQ, dK and dV of one head of at most M * TILES positions; WHOLE: of exactly so many.

    Scores are queries × keys, so that a query's log-sum-exp and delta are one register of a row, not one of each
    column. Queries behind the last have an infinite log-sum-exp: their probabilities are zero.
    """
    bh = tl.program_id(0)
    head = (bh // heads, bh % heads)
    queries = ()
    dos = ()
    lses = ()
    deltas = ()
    dqs = ()
    for i in tl.static_range(TILES):
        rows = i * M + tl.arange(0, M)
        do_i = tile_of(do, head, rows, T, SIZE, D, not WHOLE)
        o_i = tile_of(o, head, rows, T, SIZE, D, not WHOLE)
        queries = queries + (tile_of(q, head, rows, T, SIZE, D, not WHOLE),)  # noqa: RUF005
        dos = dos + (do_i,)  # noqa: RUF005
        deltas = deltas + (tl.sum(do_i.to(tl.float32) * o_i.to(tl.float32), 1),)  # noqa: RUF005
        lses = lses + (tl.load(lse + bh.to(tl.int64) * T + rows, mask=rows < T, other=float("inf")),)  # noqa: RUF005
        dqs = dqs + (tl.zeros([M, D], tl.float32),)  # noqa: RUF005
    for j in tl.static_range(TILES):
        keys = j * M + tl.arange(0, M)
        k_j = tile_of(k, head, keys, T, SIZE, D, not WHOLE)
        v_j = tile_of(v, head, keys, T, SIZE, D, not WHOLE)
        dk_j = tl.zeros([M, D], tl.float32)
        dv_j = tl.zeros([M, D], tl.float32)
        new = ()
        for i in tl.static_range(TILES):
            dq_i = dqs[i]
            if i >= j:
                rows = i * M + tl.arange(0, M)
                s = tl.dot(queries[i], tl.trans(k_j), input_precision=PRECISION)
                if i == j:
                    s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
                p = tl.exp2(s * scale2 - lses[i][:, None])
                dp = tl.dot(dos[i], tl.trans(v_j), input_precision=PRECISION)
                ds = (p * (dp - deltas[i][:, None])).to(k_j.dtype)
                dv_j = tl.dot(tl.trans(p.to(k_j.dtype)), dos[i], dv_j, input_precision=PRECISION)
                dk_j = tl.dot(tl.trans(ds), queries[i], dk_j, input_precision=PRECISION)
                dq_i = tl.dot(ds, k_j, dq_i, input_precision=PRECISION)
            new = new + (dq_i,)  # noqa: RUF005
        dqs = new
        store_tile(dk, head, keys, T, rotated_back(dk_j * scale, angles, keys, T, M, SIZE, D, WHOLE), SIZE, D)
        store_tile(dv, head, keys, T, dv_j, SIZE, D)
    for i in tl.static_range(TILES):
        rows = i * M + tl.arange(0, M)
        dq_i = rotated_back(dqs[i] * scale, angles, rows, T, M, SIZE, D, WHOLE)
        store_tile(dq, head, rows, T, dq_i, SIZE, D)


# fmt: on


def rope_attention_forward(q_k_v: tuple[Tensor, ...], angles: tuple[Tensor, Tensor], o: Tensor) -> Tensor:
    """See `lmcore.fast.kernels.rope_attention`; the log-sum-exp (B, H, T) is in base 2."""
    q, k, v = q_k_v
    batch, heads, length, size = q.shape
    lse = torch.empty(batch, heads, length, device=q.device, dtype=torch.float32)
    head_forward_kernel[(batch * heads,)](
        *map(operand, (q, k, v, o)), lse, angles, heads, length, LOG2_E / math.sqrt(size), M=TILE,
        TILES=triton.cdiv(length, TILE), SIZE=size, D=block_of(q), PRECISION=precision_of(q),
        WHOLE=length % TILE == 0, num_warps=WARPS, num_stages=1, maxnreg=FORWARD_REGISTERS,
    )  # fmt: skip
    return lse


def rope_attention_backward(
    q_k_v: tuple[Tensor, ...], o: Tensor, lse: Tensor, do: Tensor, gradients: tuple[Tensor, ...],
    angles: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """See `lmcore.fast.kernels.rope_attention`; `lse` as `rope_attention_forward` gives it."""
    q = q_k_v[0]
    batch, heads, length, size = q.shape
    scale = 1 / math.sqrt(size)
    head_gradients_kernel[(batch * heads,)](
        *map(operand, (*q_k_v, o, do, *gradients)), lse, angles, heads, length, scale * LOG2_E, scale, M=TILE,
        TILES=triton.cdiv(length, TILE), SIZE=size, D=block_of(q), PRECISION=precision_of(q),
        WHOLE=length % TILE == 0, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
