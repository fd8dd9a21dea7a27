"""All gradients of attention for short sequences, one program a head, turned back by RoPE on their way out.

The tiles of dQ stay in registers while those of keys and values pass by, so that scores are computed once, nothing is
added up in memory and the order of all sums is fixed (Dao 2023, algorithm 2, with the loop over queries unrolled).
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from lmcore.kernels.gpu.attention import block_of, precision_of
from lmcore.kernels.gpu.attention_forward import LOG2_E, store_tile, tile_of

TILE, WARPS = 64, 4
"""Queries, and keys, of a tile, and warps of a program."""

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def turned_back(x, rows, cos, sin, T, SIZE: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Rows of a head turned by the negative angles of their positions."""
    pair = tl.arange(0, D // 2)
    at = rows[:, None] * (SIZE // 2) + pair[None, :]
    inside = (rows[:, None] < T) & (pair[None, :] < SIZE // 2)
    c = tl.load(cos + at, mask=inside, other=0.0)
    s = tl.load(sin + at, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, [M, D // 2, 2]))
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [M, D])


@triton.jit
def head_gradients_kernel(q, k, v, o, do, dq, dk, dv, lse, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
                          o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, heads,
                          T, lse_rows, scale2, scale, M: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr,
                          D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr):
    """dQ, dK and dV of one head of at most M * TILES positions; WHOLE: of exactly so many."""
    bh = tl.program_id(0)
    deltas = ()
    dqs = ()
    for i in tl.static_range(TILES):
        rows = i * M + tl.arange(0, M)
        do_i = tile_of(do, do_b, do_h, do_t, bh, heads, rows, T, SIZE, D, not WHOLE)
        o_i = tile_of(o, o_b, o_h, o_t, bh, heads, rows, T, SIZE, D, not WHOLE)
        deltas = deltas + (tl.sum(do_i.to(tl.float32) * o_i.to(tl.float32), 1),)  # noqa: RUF005
        dqs = dqs + (tl.zeros([M, D], tl.float32),)  # noqa: RUF005
    for j in tl.static_range(TILES):
        keys = j * M + tl.arange(0, M)
        k_j = tile_of(k, k_b, k_h, k_t, bh, heads, keys, T, SIZE, D, not WHOLE)
        v_j = tile_of(v, v_b, v_h, v_t, bh, heads, keys, T, SIZE, D, not WHOLE)
        dk_j = tl.zeros([M, D], tl.float32)
        dv_j = tl.zeros([M, D], tl.float32)
        new = ()
        for i in tl.static_range(TILES):
            dq_i = dqs[i]
            if i >= j or not CAUSAL:
                rows = i * M + tl.arange(0, M)
                q_i = tile_of(q, q_b, q_h, q_t, bh, heads, rows, T, SIZE, D, not WHOLE)
                do_i = tile_of(do, do_b, do_h, do_t, bh, heads, rows, T, SIZE, D, not WHOLE)
                lse_i = tl.load(lse + bh.to(tl.int64) * lse_rows + rows, mask=rows < T, other=float("inf"))
                s = tl.dot(k_j, tl.trans(q_i), input_precision=PRECISION)
                p = tl.exp2(s * scale2 - lse_i[None, :])
                if CAUSAL and i == j:
                    p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
                elif not WHOLE:
                    p = tl.where(keys[:, None] < T, p, 0.0)
                dp = tl.dot(v_j, tl.trans(do_i), input_precision=PRECISION)
                dv_j = tl.dot(p.to(do_i.dtype), do_i, dv_j, input_precision=PRECISION)
                ds = (p * (dp - deltas[i][None, :])).to(q_i.dtype)
                dk_j = tl.dot(ds, q_i, dk_j, input_precision=PRECISION)
                dq_i = tl.dot(tl.trans(ds), k_j, dq_i, input_precision=PRECISION)
            new = new + (dq_i,)  # noqa: RUF005
        dqs = new
        dk_j = turned_back(dk_j * scale, keys, cos, sin, T, SIZE, M, D)
        store_tile(dk, dk_b, dk_h, dk_t, bh, heads, keys, T, dk_j, SIZE, D)
        store_tile(dv, dv_b, dv_h, dv_t, bh, heads, keys, T, dv_j, SIZE, D)
    for i in tl.static_range(TILES):
        rows = i * M + tl.arange(0, M)
        dq_i = turned_back(dqs[i] * scale, rows, cos, sin, T, SIZE, M, D)
        store_tile(dq, dq_b, dq_h, dq_t, bh, heads, rows, T, dq_i, SIZE, D)


# fmt: on


def turned_attention_backward(
    q_k_v: tuple[Tensor, ...],
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    gradients: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
    tile: int = TILE,
    warps: int = WARPS,
) -> None:
    """See `lmcore.kernels.turned_attention`; causal."""
    batch, heads, length, size = q_k_v[0].shape
    tensors = (*q_k_v, o, do, *gradients)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    scale = 1 / math.sqrt(size)
    head_gradients_kernel[(batch * heads,)](
        *tensors, lse, cos, sin, *strides, heads, length, lse.shape[-1], scale * LOG2_E, scale,
        M=tile, TILES=triton.cdiv(length, tile), SIZE=size, D=block_of(do), CAUSAL=True, PRECISION=precision_of(do),
        WHOLE=length % tile == 0, num_warps=warps, num_stages=1,
    )  # fmt: skip
