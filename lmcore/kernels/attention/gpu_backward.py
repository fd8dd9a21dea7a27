"""The backward pass of FlashAttention-2 in Triton (Dao 2023, algorithm 2), without sums in memory."""

import triton
import triton.language as tl

from lmcore.kernels.attention.gpu_forward import LOG2_E, store_tile, tile_and_head, tile_of
from lmcore.kernels.rope.gpu import turned_back

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def gather_dq(dq, q, do, lse, delta, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows, first, last, T, scale,
              N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
              PRECISION: tl.constexpr):
    """dQ of a tile of queries from tiles of keys from `first` up to `last` (algorithm 2, lines 11 to 15)."""
    for tile in range(first, last):
        keys = tile * N + tl.arange(0, N)
        k_tile = tile_of(k, k_b, k_h, k_t, bh, heads, keys, T, SIZE, D, MASKED)
        v_tile = tile_of(v, v_b, v_h, v_t, bh, heads, keys, T, SIZE, D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            keep = keys[None, :] < T
            if CAUSAL:
                keep = keep & (keys[None, :] <= rows[:, None])
            p = tl.where(keep, p, 0.0)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_gradients(q, k, v, o, do, dq, lse, delta, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h,
                    o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, tile, bh, heads, T, lse_rows, scale, M: tl.constexpr,
                    N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, TURNED: tl.constexpr,
                    PRECISION: tl.constexpr):
    """dQ of one tile of queries of one head; also delta = sum(dO · O), for the other gradients."""
    rows = tile * M + tl.arange(0, M)
    at = bh.to(tl.int64) * lse_rows + rows
    do_tile = tile_of(do, do_b, do_h, do_t, bh, heads, rows, T, SIZE, D, True)
    o_tile = tile_of(o, o_b, o_h, o_t, bh, heads, rows, T, SIZE, D, True)
    delta_tile = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta + at, delta_tile, mask=rows < lse_rows)
    q_tile = tile_of(q, q_b, q_h, q_t, bh, heads, rows, T, SIZE, D, True)
    lse_tile = tl.load(lse + at, mask=rows < T, other=float("inf"))
    whole = T // N
    last = tl.cdiv(T, N)
    if CAUSAL:
        whole = tl.minimum(whole, tile * M // N)
        last = tl.minimum(last, tl.cdiv((tile + 1) * M, N))
    acc = tl.zeros([M, D], tl.float32)
    acc = gather_dq(acc, q_tile, do_tile, lse_tile, delta_tile, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows, 0,
                    whole, T, scale * LOG2_E, N, SIZE, D, CAUSAL, False, PRECISION)
    acc = gather_dq(acc, q_tile, do_tile, lse_tile, delta_tile, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows,
                    whole, last, T, scale * LOG2_E, N, SIZE, D, CAUSAL, True, PRECISION)
    acc *= scale
    if TURNED:
        acc = turned_back(acc, cos, sin, rows, T, M, SIZE, D, False)
    store_tile(dq, dq_b, dq_h, dq_t, bh, heads, rows, T, acc, SIZE, D)


@triton.jit
def gather_dk_dv(dk, dv, k, v, o, o_b, o_h, o_t, lse, delta, q, q_b, q_h, q_t, do, do_b, do_h, do_t, bh, heads, keys,
                 first, last, T, lse_rows, scale, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                 CAUSAL: tl.constexpr, MASKED: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr):
    """dK and dV of a tile of keys from tiles of queries from `first` up to `last`; scores lie transposed."""
    for tile in range(first, last):
        rows = tile * M + tl.arange(0, M)
        at = bh.to(tl.int64) * lse_rows + rows
        q_tile = tile_of(q, q_b, q_h, q_t, bh, heads, rows, T, SIZE, D, MASKED)
        do_tile = tile_of(do, do_b, do_h, do_t, bh, heads, rows, T, SIZE, D, MASKED)
        lse_tile = tl.load(lse + at, mask=rows < T, other=float("inf"))  # no probability behind the last position
        if DELTA:
            delta_tile = tl.load(delta + at, mask=rows < T, other=0.0)
        else:
            o_tile = tile_of(o, o_b, o_h, o_t, bh, heads, rows, T, SIZE, D, MASKED)
            delta_tile = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        p = tl.exp2(s * scale - lse_tile[None, :])
        if MASKED and CAUSAL:
            p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        ds = p * (dp - delta_tile[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(q, k, v, o, do, dk, dv, lse, delta, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h,
                  o_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, tile, bh, heads, T, lse_rows, scale,
                  M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                  DELTA: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """dK and dV of one tile of keys of one head, with delta read or, without DELTA, computed again."""
    keys = tile * N + tl.arange(0, N)
    k_tile = tile_of(k, k_b, k_h, k_t, bh, heads, keys, T, SIZE, D, True)
    v_tile = tile_of(v, v_b, v_h, v_t, bh, heads, keys, T, SIZE, D, True)
    diagonal = 0
    whole = T // M
    last = tl.cdiv(T, M)
    dk_tile = tl.zeros([N, D], tl.float32)
    dv_tile = tl.zeros([N, D], tl.float32)
    if CAUSAL:
        diagonal = tl.minimum(tl.cdiv((tile + 1) * N, M), last)  # up to here a mask is needed
        whole = tl.maximum(whole, diagonal)
        dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, o, o_b, o_h, o_t, lse, delta, q, q_b, q_h,
                                        q_t, do, do_b, do_h, do_t, bh, heads, keys, tile * N // M, diagonal, T,
                                        lse_rows, scale * LOG2_E, M, SIZE, D, CAUSAL, True, DELTA, PRECISION)
    dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, o, o_b, o_h, o_t, lse, delta, q, q_b, q_h, q_t,
                                    do, do_b, do_h, do_t, bh, heads, keys, diagonal, whole, T, lse_rows,
                                    scale * LOG2_E, M, SIZE, D, CAUSAL, False, DELTA, PRECISION)
    dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, o, o_b, o_h, o_t, lse, delta, q, q_b, q_h, q_t,
                                    do, do_b, do_h, do_t, bh, heads, keys, whole, last, T, lse_rows, scale * LOG2_E, M,
                                    SIZE, D, CAUSAL, True, DELTA, PRECISION)
    dk_tile *= scale
    if TURNED:
        dk_tile = turned_back(dk_tile, cos, sin, keys, T, N, SIZE, D, False)
    store_tile(dk, dk_b, dk_h, dk_t, bh, heads, keys, T, dk_tile, SIZE, D)
    store_tile(dv, dv_b, dv_h, dv_t, bh, heads, keys, T, dv_tile, SIZE, D)


@triton.jit(do_not_specialize=["all_heads", "group"])
def attention_backward_kernel(q, k, v, o, do, dq, dk, dv, lse, delta, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h,
                              v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, dv_b, dv_h,
                              dv_t, all_heads, heads, group, T, lse_rows, scale, M: tl.constexpr, N: tl.constexpr,
                              SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, TURNED: tl.constexpr,
                              PRECISION: tl.constexpr, PART: tl.constexpr):
    """dQ of a tile of M positions, or dK and dV of one; for both, even programs do the first and odd ones the second.

    With a causal mask the last queries have most keys and the first keys most queries: those of a group of heads start
    first. TURNED: RoPE has turned q and k, and dQ and dK are turned back.
    """
    tiles = tl.cdiv(T, M)
    program = tl.program_id(0)
    of_keys = PART == "keys"
    if PART == "both":
        of_keys = program % 2 == 1
        program = program // 2
    tile, bh = tile_and_head(program, tiles, all_heads, group)
    if of_keys:
        key_gradients(q, k, v, o, do, dk, dv, lse, delta, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b,
                      o_h, o_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, tile, bh, heads, T, lse_rows,
                      scale, N, M, SIZE, D, CAUSAL, PART == "keys", TURNED, PRECISION)
    else:
        query_gradients(q, k, v, o, do, dq, lse, delta, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b,
                        o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, tiles - 1 - tile, bh, heads, T, lse_rows, scale,
                        M, N, SIZE, D, CAUSAL, TURNED, PRECISION)
