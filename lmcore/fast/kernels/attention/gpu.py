"""FlashAttention-2 in Triton, for every CUDA chip (Dao 2023): `reference` with one program for each tile.

The backward pass has two parts: dQ by tiles of queries, and dK with dV by tiles of keys. Each output is written by one
program alone, in a fixed order, so that results repeat bit by bit; the price is that scores are computed once more.

Tensors are batch × heads × positions × head size with any strides whose last is 1. The log-sum-exp is in base 2, of
batch × heads × rows in float32; rows behind the last position hold infinity, which makes their probabilities zero.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmcore.fast.kernels.attention import lse_rows_of

LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))
"""Exponentials are of base 2, which the chip computes."""

FEW_TILES = 512
"""Tiles of 64 positions, over all heads, that do not fill the H200."""

# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


# --- tiles: rows of one head, read, turned by RoPE and written. A tensor is a tuple, see `operand`; a head is (batch,
# --- head within it)


@triton.jit
def rows_of(x, head, offs_m, D: tl.constexpr):
    """Pointers to rows of one head."""
    pointer, stride_b, stride_h, stride_t, wide = x
    at = pointer + head[0].to(tl.int64) * stride_b + head[1].to(tl.int64) * stride_h
    if wide is None:
        return at + (offs_m[:, None] * stride_t + tl.arange(0, D)[None, :])
    return at + (offs_m[:, None].to(tl.int64) * stride_t + tl.arange(0, D)[None, :])


@triton.jit
def tile_of(x, head, offs_m, T, SIZE: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr):
    """Loads rows of one head, zeros where there is nothing; without CHECK no row is behind the last."""
    d = tl.arange(0, D)
    if CHECK:
        return tl.load(rows_of(x, head, offs_m, D), mask=(offs_m[:, None] < T) & (d[None, :] < SIZE), other=0.0)
    if SIZE < D:
        return tl.load(rows_of(x, head, offs_m, D), mask=d[None, :] < SIZE, other=0.0)
    return tl.load(rows_of(x, head, offs_m, D))


@triton.jit
def store_tile(x, head, offs_m, T, value, SIZE: tl.constexpr, D: tl.constexpr):
    """Stores rows of one head in the tensor's own type."""
    inside = (offs_m[:, None] < T) & (tl.arange(0, D)[None, :] < SIZE)
    tl.store(rows_of(x, head, offs_m, D), value.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def load_angles(table, rows, T, SIZE: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of the cosines or sines (T, SIZE / 2), of which D / 2 is the next power of two; WHOLE: none is missing."""
    pair = tl.arange(0, D // 2)
    at = table + rows[:, None] * (SIZE // 2) + pair[None, :]
    if WHOLE and SIZE == D:
        return tl.load(at)
    return tl.load(at, mask=(rows[:, None] < T) & (pair[None, :] < SIZE // 2), other=0.0)


@triton.jit
def rotated(x, c, s, M: tl.constexpr, D: tl.constexpr):
    """Feature pairs of x (M, D) rotated by angles with cosines c and sines s (M, D / 2), in x's type."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [M, D // 2, 2]))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [M, D]).to(x.dtype)


@triton.jit
def rotated_back(x, angles, rows, T, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """The gradient of rows of a head from that of the same rows rotated: a rotation's inverse is its transpose."""
    c = load_angles(angles[0], rows, T, SIZE, D, WHOLE)
    s = load_angles(angles[1], rows, T, SIZE, D, WHOLE)
    return rotated(x, c, -s, M, D)


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
def tiles_of_keys(tile, T, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """How many tiles of keys all queries of a tile see all of, which need no mask, and how many they see at all."""
    whole = T // BLOCK_N
    last = tl.cdiv(T, BLOCK_N)
    if CAUSAL:
        whole = tl.minimum(whole, tile * BLOCK_M // BLOCK_N)
        last = tl.minimum(last, tl.cdiv((tile + 1) * BLOCK_M, BLOCK_N))
    return whole, last


# --- the forward pass (algorithm 1)


@triton.jit
def attend(q, acc, m_i, l_i, k, v, head, offs_m, first, last, T, scale, BLOCK_N: tl.constexpr, SIZE: tl.constexpr,
           D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """The running softmax of a tile of queries over tiles of keys from `first` up to `last` (algorithm 1)."""
    for tile in range(first, last):
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = tile_of(k, head, offs_n, T, SIZE, D, MASKED)
        v_tile = tile_of(v, head, offs_n, T, SIZE, D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            keep = offs_n[None, :] < T
            if CAUSAL:
                keep = keep & (offs_n[None, :] <= offs_m[:, None])
            s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["all_heads", "group"])
def attention_forward_kernel(q, k, v, o, lse, all_heads, heads, group, T, lse_rows, scale, BLOCK_M: tl.constexpr,
                             BLOCK_N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                             PRECISION: tl.constexpr):
    """One tile of queries of one head; of a group of heads those with most keys start first."""
    tiles = tl.cdiv(T, BLOCK_M)
    rank, bh = tile_and_head(tl.program_id(0), tiles, all_heads, group)
    head = (bh // heads, bh % heads)
    tile = tiles - 1 - rank
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_tile = tile_of(q, head, offs_m, T, SIZE, D, True)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    whole, last = tiles_of_keys(tile, T, BLOCK_M, BLOCK_N, CAUSAL)
    acc, m_i, l_i = attend(q_tile, acc, m_i, l_i, k, v, head, offs_m, 0, whole, T, scale, BLOCK_N, SIZE, D, CAUSAL,
                           False, PRECISION)
    acc, m_i, l_i = attend(q_tile, acc, m_i, l_i, k, v, head, offs_m, whole, last, T, scale, BLOCK_N, SIZE, D, CAUSAL,
                           True, PRECISION)
    store_tile(o, head, offs_m, T, acc / l_i[:, None], SIZE, D)
    value = tl.where(offs_m < T, m_i + tl.log2(l_i), float("inf"))
    lse_at = lse + bh.to(tl.int64) * lse_rows + offs_m
    tl.store(lse_at, value, mask=offs_m < lse_rows)
    if tile == tiles - 1:  # whole pieces of 128 rows
        for _ in tl.static_range(128 // BLOCK_M - 1):
            offs_m += BLOCK_M
            lse_at += BLOCK_M
            tl.store(lse_at, tl.full([BLOCK_M], float("inf"), tl.float32), mask=offs_m < lse_rows)


# --- the backward pass (algorithm 2), without sums in memory


@triton.jit
def gather_dq(dq, q, do, lse, delta, k, v, head, offs_m, first, last, T, scale, BLOCK_N: tl.constexpr,
              SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
              PRECISION: tl.constexpr):
    """dQ of a tile of queries from tiles of keys from `first` up to `last` (algorithm 2, lines 11 to 15)."""
    for tile in range(first, last):
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_tile = tile_of(k, head, offs_n, T, SIZE, D, MASKED)
        v_tile = tile_of(v, head, offs_n, T, SIZE, D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            keep = offs_n[None, :] < T
            if CAUSAL:
                keep = keep & (offs_n[None, :] <= offs_m[:, None])
            p = tl.where(keep, p, 0.0)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_gradients(q, k, v, o, do, dq, lse, delta, angles, tile, bh, heads, T, lse_rows, scale, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                    ROPE: tl.constexpr, PRECISION: tl.constexpr):
    """dQ of one tile of queries of one head; also delta = sum(dO · O), for the other gradients."""
    head = (bh // heads, bh % heads)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at = bh.to(tl.int64) * lse_rows + offs_m
    do_tile = tile_of(do, head, offs_m, T, SIZE, D, True)
    o_tile = tile_of(o, head, offs_m, T, SIZE, D, True)
    delta_tile = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta + at, delta_tile, mask=offs_m < lse_rows)
    q_tile = tile_of(q, head, offs_m, T, SIZE, D, True)
    lse_tile = tl.load(lse + at, mask=offs_m < T, other=float("inf"))
    whole, last = tiles_of_keys(tile, T, BLOCK_M, BLOCK_N, CAUSAL)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    acc = gather_dq(acc, q_tile, do_tile, lse_tile, delta_tile, k, v, head, offs_m, 0, whole, T, scale * LOG2_E,
                    BLOCK_N, SIZE, D, CAUSAL, False, PRECISION)
    acc = gather_dq(acc, q_tile, do_tile, lse_tile, delta_tile, k, v, head, offs_m, whole, last, T, scale * LOG2_E,
                    BLOCK_N, SIZE, D, CAUSAL, True, PRECISION)
    acc *= scale
    if ROPE:
        acc = rotated_back(acc, angles, offs_m, T, BLOCK_M, SIZE, D, False)
    store_tile(dq, head, offs_m, T, acc, SIZE, D)


@triton.jit
def gather_dk_dv(dk, dv, k, v, o, lse, delta, q, do, head, offs_n, first, last, T, scale, BLOCK_M: tl.constexpr,
                 SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DELTA: tl.constexpr,
                 PRECISION: tl.constexpr):
    """dK and dV of a tile of keys from tiles of queries from `first` up to `last`; scores lie transposed."""
    for tile in range(first, last):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q_tile = tile_of(q, head, offs_m, T, SIZE, D, MASKED)
        do_tile = tile_of(do, head, offs_m, T, SIZE, D, MASKED)
        lse_tile = tl.load(lse + offs_m, mask=offs_m < T, other=float("inf"))  # no probability behind the last position
        if DELTA:
            delta_tile = tl.load(delta + offs_m, mask=offs_m < T, other=0.0)
        else:
            o_tile = tile_of(o, head, offs_m, T, SIZE, D, MASKED)
            delta_tile = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        p = tl.exp2(s * scale - lse_tile[None, :])
        if MASKED and CAUSAL:
            p = tl.where(offs_n[:, None] <= offs_m[None, :], p, 0.0)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
        ds = p * (dp - delta_tile[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(q, k, v, o, do, dk, dv, lse, delta, angles, tile, bh, heads, T, lse_rows, scale,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                  CAUSAL: tl.constexpr, DELTA: tl.constexpr, ROPE: tl.constexpr, PRECISION: tl.constexpr):
    """dK and dV of one tile of keys of one head, with delta read or, without DELTA, computed again."""
    head = (bh // heads, bh % heads)
    lse += bh.to(tl.int64) * lse_rows
    delta += bh.to(tl.int64) * lse_rows
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_tile = tile_of(k, head, offs_n, T, SIZE, D, True)
    v_tile = tile_of(v, head, offs_n, T, SIZE, D, True)
    last = tl.cdiv(T, BLOCK_M)
    first, diagonal, whole = 0, 0, T // BLOCK_M
    if CAUSAL:
        first = tile * BLOCK_N // BLOCK_M
        diagonal = tl.minimum(tl.cdiv((tile + 1) * BLOCK_N, BLOCK_M), last)  # up to here a mask is needed
        whole = tl.maximum(whole, diagonal)
    dk_tile = tl.zeros([BLOCK_N, D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, D], tl.float32)
    if CAUSAL:
        dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, o, lse, delta, q, do, head, offs_n, first,
                                        diagonal, T, scale * LOG2_E, BLOCK_M, SIZE, D, CAUSAL, True, DELTA, PRECISION)
    dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, o, lse, delta, q, do, head, offs_n, diagonal,
                                    whole, T, scale * LOG2_E, BLOCK_M, SIZE, D, CAUSAL, False, DELTA, PRECISION)
    dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, o, lse, delta, q, do, head, offs_n, whole, last,
                                    T, scale * LOG2_E, BLOCK_M, SIZE, D, CAUSAL, True, DELTA, PRECISION)
    dk_tile *= scale
    if ROPE:
        dk_tile = rotated_back(dk_tile, angles, offs_n, T, BLOCK_N, SIZE, D, False)
    store_tile(dk, head, offs_n, T, dk_tile, SIZE, D)
    store_tile(dv, head, offs_n, T, dv_tile, SIZE, D)


@triton.jit(do_not_specialize=["all_heads", "group"])
def attention_backward_kernel(q, k, v, o, do, dq, dk, dv, lse, delta, angles, all_heads, heads, group, T, lse_rows,
                              scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                              CAUSAL: tl.constexpr, ROPE: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr):
    """dQ of a tile of M positions, or dK and dV of one; for both, even programs do the first and odd ones the second.

    With a causal mask the last queries have most keys and the first keys most queries: those of a group of heads start
    first. ROPE: RoPE has rotated q and k, and dQ and dK are rotated back.
    """
    tiles = tl.cdiv(T, BLOCK_M)
    program = tl.program_id(0)
    of_keys = PART == "keys"
    if PART == "both":
        of_keys = program % 2 == 1
        program = program // 2
    tile, bh = tile_and_head(program, tiles, all_heads, group)
    if of_keys:
        key_gradients(q, k, v, o, do, dk, dv, lse, delta, angles, tile, bh, heads, T, lse_rows, scale, BLOCK_N, BLOCK_M,
                      SIZE, D, CAUSAL, PART == "keys", ROPE, PRECISION)
    else:
        query_gradients(q, k, v, o, do, dq, lse, delta, angles, tiles - 1 - tile, bh, heads, T, lse_rows, scale,
                        BLOCK_M, BLOCK_N, SIZE, D, CAUSAL, ROPE, PRECISION)


# --- around the backward pass of `hopper`: delta and zeros before, dQ from its sums after; where RoPE has rotated
# --- queries and keys, dQ and dK are rotated back on the way


@triton.jit
def attention_prepare_kernel(o, do, delta, sums, counter, heads, T, lse_rows, SIZE: tl.constexpr, D: tl.constexpr,
                             ROWS: tl.constexpr):
    """delta = sum over features of dO · O (Dao 2023, algorithm 2, line 4), and zeros: sums of dQ, counter."""
    if tl.program_id(0) == 0:
        tl.store(counter, 0)
    blocks = tl.cdiv(lse_rows, ROWS)
    offs_m = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(0) // blocks
    head = (bh // heads, bh % heads)
    left = tile_of(o, head, offs_m, T, SIZE, D, True).to(tl.float32)
    right = tile_of(do, head, offs_m, T, SIZE, D, True).to(tl.float32)
    tl.store(delta + bh.to(tl.int64) * lse_rows + offs_m, tl.sum(left * right, 1))
    at = (bh.to(tl.int64) * lse_rows + offs_m)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(sums + at, tl.zeros([ROWS, D], tl.float32))


@triton.jit
def attention_finish_kernel(sums, dq, dk, angles, heads, T, lse_rows, scale, SIZE: tl.constexpr, D: tl.constexpr,
                            C: tl.constexpr, ROWS: tl.constexpr, ROPE: tl.constexpr):
    """dQ from sums as `hopper.add_query_gradients` leaves them, C features a part; ROPE: dQ and dK are rotated back."""
    blocks = tl.cdiv(T, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    offs_m = first + tl.arange(0, ROWS)
    bh = tl.program_id(0) // blocks
    head = (bh // heads, bh % heads)
    parts = (bh.to(tl.int64) * lse_rows + first // 64 * 64) * D + tl.arange(0, D // C) * (64 * C)
    flat = tl.load(sums + (parts + first % 64 * C)[:, None] + tl.arange(0, ROWS * C)[None, :])
    flat = flat.reshape([D // C, ROWS // 16, C // 8, 8, 4, 2, 2]).permute((1, 5, 3, 0, 2, 4, 6))
    value = flat.reshape([ROWS, D]) * scale
    if ROPE:
        value = rotated_back(value, angles, offs_m, T, ROWS, SIZE, D, False)
        key = tile_of(dk, head, offs_m, T, SIZE, D, True)
        store_tile(dk, head, offs_m, T, rotated_back(key, angles, offs_m, T, ROWS, SIZE, D, False), SIZE, D)
    store_tile(dq, head, offs_m, T, value, SIZE, D)


# fmt: on


# --- the launches


class Tiles(NamedTuple):
    """Positions of a program's own tile and of the tiles that it loops over, warps, and stages of its loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def forward_tiles(q: Tensor) -> Tiles:
    """Tiles of the forward pass by type and head size, by measurement on the H200, in float32 on the H100.

    Without tensor cores a tile's operands stay in registers: it has few positions.
    """
    size = block_of(q)
    if q.dtype == torch.float32:
        if precision_of(q) == "ieee":
            return Tiles(16, 64 if size > 64 else 128, 4, 1)
        return Tiles(64, 32, 4, 1 if size > 64 else 2)
    return Tiles(64, 32, 4, 3) if size <= 32 else Tiles(64, 64, 4, 3 if size <= 64 else 2)


def backward_tiles(q: Tensor) -> dict[str, Tiles]:
    """Tiles of the parts of the backward pass: positions of a tile, and of those that pass by.

    Where a launch costs more than delta's second computation, one launch does both parts.
    """
    batch, heads, length, _ = q.shape
    size = block_of(q)
    if q.dtype == torch.float32:
        if precision_of(q) != "ieee":
            return dict.fromkeys(("queries", "keys"), Tiles(32, 32, 4, 1))
        return {"queries": Tiles(16, 64, 8 if size > 64 else 4, 1), "keys": Tiles(16, 64, 8 if size == 64 else 4, 1)}
    if size <= 64 and triton.cdiv(length, 64) * batch * heads <= FEW_TILES:
        return {"both": Tiles(64, 64 if size == 64 else 32, 4, 2)}
    keys = 32 if size <= 32 or size > 64 else 64
    return {"queries": Tiles(64, 64 if size > 32 else 32, 4, 3 if size <= 64 else 2), "keys": Tiles(64, keys, 4, 2)}


def block_of(q: Tensor) -> int:
    """The head size filled up to a power of two, of which matmuls take 16 and more."""
    return max(16, triton.next_power_of_2(q.shape[-1]))


def precision_of(q: Tensor) -> str:
    """Of matmuls of float32: whole, unless PyTorch's own may round to TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def operand(x: Tensor) -> tuple:
    """A tensor as the kernels take it: address, strides of batch, head and position, and whether (True or None)
    offsets within a head need 64 bits."""
    return *(x, *x.stride()[:3]), True if x.shape[-2] * x.stride(-2) >= 2**31 else None


def heads_of_group(q: Tensor, causal: bool, backward: bool = False) -> int:
    """Heads whose tiles are put in order of their length together, since a long program at the end is waited for.

    What all programs of a group read over and over again fills half of the second-level cache: keys and values, or
    queries, gradients of the output and sums of dQ in float32. Without a mask all are of one length: head by head.
    """
    batch, heads, length, size = q.shape
    if not causal:
        return 1
    cache = torch.cuda.get_device_properties(q.device).L2_cache_size if q.is_cuda else 2**25
    bytes_of_head = length * size * (2 * q.element_size() + (4 if backward else 0))
    return max(1, min(batch * heads, cache // 2 // bytes_of_head))


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see `lmcore.fast.kernels.attention.attention_forward`."""
    batch, heads, length, size = q.shape
    lse = torch.empty(batch, heads, lse_rows_of(length), device=q.device, dtype=torch.float32)
    m, n, warps, stages = forward_tiles(q)
    attention_forward_kernel[(triton.cdiv(length, m) * batch * heads,)](
        *map(operand, (q, k, v, out)), lse, batch * heads, heads, heads_of_group(q, causal), length, lse.shape[-1],
        LOG2_E.value / math.sqrt(size), m, n, size, block_of(q), causal, precision_of(q), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, dq: Tensor, dk: Tensor,
    dv: Tensor, angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients into dq, dk and dv; see `lmcore.fast.kernels.attention.attention_backward`."""
    batch, heads, length, size = q.shape
    delta = torch.empty_like(lse)
    tensors, group = [operand(x) for x in (q, k, v, o, do, dq, dk, dv)], heads_of_group(q, causal)
    for part, (m, n, warps, stages) in backward_tiles(q).items():
        programs = triton.cdiv(length, m) * batch * heads * (2 if part == "both" else 1)
        attention_backward_kernel[(programs,)](
            *tensors, lse, delta, angles or (lse, lse), batch * heads, heads, group, length, lse.shape[-1],
            1 / math.sqrt(size), m, n, size, block_of(q), causal, angles is not None, precision_of(q), part,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv
