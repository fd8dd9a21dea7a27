"""The forward pass of FlashAttention-2 in Triton (Dao 2023, algorithm 1), and how a tile is read and written."""

import math

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))
"""Exponentials are of base 2, which the chip computes."""

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def tile_and_head(program, tiles, all_heads, group):
    """The first tiles of all heads of a group, then their second ones, and so on; then the next group.

    The first group may have fewer heads, the last one has all: what is long must not start late.
    """
    missing = tl.cdiv(all_heads, group) * group - all_heads
    end = ((program + missing * tiles) // (group * tiles) + 1) * group - missing
    before = tl.maximum(end - group, 0)
    rest = program - before * tiles
    here = end - before
    return rest // here, before + rest % here


@triton.jit
def tile_of(pointer, stride_b, stride_h, stride_t, bh, heads, rows, T, SIZE: tl.constexpr, D: tl.constexpr,
            CHECK: tl.constexpr):
    """Loads rows of one head, zeros where there is nothing."""
    d = tl.arange(0, D)
    at = (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    pointers = pointer + at + rows[:, None].to(tl.int64) * stride_t + d[None, :]
    if CHECK:
        return tl.load(pointers, mask=(rows[:, None] < T) & (d[None, :] < SIZE), other=0.0)
    if SIZE < D:
        return tl.load(pointers, mask=d[None, :] < SIZE, other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(pointer, stride_b, stride_h, stride_t, bh, heads, rows, T, value, SIZE: tl.constexpr, D: tl.constexpr):
    """Stores rows of one head in the tensor's own type."""
    d = tl.arange(0, D)
    at = (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    pointers = pointer + at + rows[:, None].to(tl.int64) * stride_t + d[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=(rows[:, None] < T) & (d[None, :] < SIZE))


@triton.jit
def attend(q, acc, m, total, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows, first, last, T, scale,
           N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
           PRECISION: tl.constexpr):
    """The running softmax of a tile of queries over tiles of keys from `first` up to `last` (algorithm 1)."""
    for tile in range(first, last):
        keys = tile * N + tl.arange(0, N)
        k_tile = tile_of(k, k_b, k_h, k_t, bh, heads, keys, T, SIZE, D, MASKED)
        v_tile = tile_of(v, v_b, v_h, v_t, bh, heads, keys, T, SIZE, D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            keep = keys[None, :] < T
            if CAUSAL:
                keep = keep & (keys[None, :] <= rows[:, None])
            s = tl.where(keep, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        shrink = tl.exp2(m - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        m = new
    return acc, m, total


@triton.jit(do_not_specialize=["all_heads", "group"])
def attention_forward_kernel(q, k, v, o, lse, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, all_heads,
                             heads, group, T, lse_rows, scale, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
                             D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of queries of one head; of a group of heads those with most keys start first."""
    tiles = tl.cdiv(T, M)
    rank, bh = tile_and_head(tl.program_id(0), tiles, all_heads, group)
    tile = tiles - 1 - rank
    rows = tile * M + tl.arange(0, M)
    q_tile = tile_of(q, q_b, q_h, q_t, bh, heads, rows, T, SIZE, D, True)
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    whole = T // N  # tiles of keys that every query of this tile sees all of: these need no mask
    last = tl.cdiv(T, N)
    if CAUSAL:
        whole = tl.minimum(whole, tile * M // N)
        last = tl.minimum(last, tl.cdiv((tile + 1) * M, N))
    acc, m, total = attend(q_tile, acc, m, total, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows, 0, whole, T,
                           scale, N, SIZE, D, CAUSAL, False, PRECISION)
    acc, m, total = attend(q_tile, acc, m, total, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows, whole, last, T,
                           scale, N, SIZE, D, CAUSAL, True, PRECISION)
    store_tile(o, o_b, o_h, o_t, bh, heads, rows, T, acc / total[:, None], SIZE, D)
    value = tl.where(rows < T, m + tl.log2(total), float("inf"))
    lse_at = lse + bh.to(tl.int64) * lse_rows + rows
    tl.store(lse_at, value, mask=rows < lse_rows)
    if tile == tiles - 1:  # whole pieces of 128 rows
        for _ in tl.static_range(128 // M - 1):
            rows += M
            lse_at += M
            tl.store(lse_at, tl.full([M], float("inf"), tl.float32), mask=rows < lse_rows)
