"""FlashAttention-2 in Triton, for every CUDA chip (Dao 2023). The mathematics is that of `attention_tiled`.

Three kernels: the forward pass, dQ by tiles of queries, and dK with dV by tiles of keys. Each output is written by one
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

LOG2_E = 1 / math.log(2)


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps of a program and stages of its loads."""

    queries: int
    keys: int
    warps: int
    stages: int


# signatures and calls of kernels are lists of operands: they stay as they are written
# fmt: off


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


@triton.jit
def attention_forward_kernel(q, k, v, o, lse, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, heads, T,
                             lse_rows, scale, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                             CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of queries of one head; with a causal mask those with most keys start first."""
    tiles = tl.cdiv(T, M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
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
    tl.store(lse + bh.to(tl.int64) * lse_rows + rows, value, mask=rows < lse_rows)


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
def attention_query_gradients_kernel(q, k, v, o, do, dq, lse, delta, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b,
                                     o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, heads, T, lse_rows, scale2, scale,
                                     M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                                     CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """dQ of one tile of queries of one head; also delta = sum(dO · O), which the other gradients need."""
    tiles = tl.cdiv(T, M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
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
                    whole, T, scale2, N, SIZE, D, CAUSAL, False, PRECISION)
    acc = gather_dq(acc, q_tile, do_tile, lse_tile, delta_tile, k, k_b, k_h, k_t, v, v_b, v_h, v_t, bh, heads, rows,
                    whole, last, T, scale2, N, SIZE, D, CAUSAL, True, PRECISION)
    store_tile(dq, dq_b, dq_h, dq_t, bh, heads, rows, T, acc * scale, SIZE, D)


@triton.jit
def gather_dk_dv(dk, dv, k, v, lse, delta, q, q_b, q_h, q_t, do, do_b, do_h, do_t, bh, heads, keys, first, last, T,
                 lse_rows, scale, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                 MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """dK and dV of a tile of keys from tiles of queries from `first` up to `last`; scores lie transposed."""
    for tile in range(first, last):
        rows = tile * M + tl.arange(0, M)
        at = bh.to(tl.int64) * lse_rows + rows
        q_tile = tile_of(q, q_b, q_h, q_t, bh, heads, rows, T, SIZE, D, MASKED)
        do_tile = tile_of(do, do_b, do_h, do_t, bh, heads, rows, T, SIZE, D, MASKED)
        lse_tile = tl.load(lse + at, mask=rows < T, other=float("inf"))  # no probability behind the last position
        delta_tile = tl.load(delta + at, mask=rows < T, other=0.0)
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
def attention_key_gradients_kernel(q, k, v, do, dk, dv, lse, delta, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b,
                                   do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, heads, T, lse_rows, scale2, scale,
                                   M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                                   CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """dK and dV of one tile of keys of one head; with a causal mask the first keys have most queries."""
    tiles = tl.cdiv(T, N)
    tile = tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    keys = tile * N + tl.arange(0, N)
    k_tile = tile_of(k, k_b, k_h, k_t, bh, heads, keys, T, SIZE, D, True)
    v_tile = tile_of(v, v_b, v_h, v_t, bh, heads, keys, T, SIZE, D, True)
    first = 0
    diagonal = 0
    whole = T // M
    last = tl.cdiv(T, M)
    if CAUSAL:
        first = tile * N // M
        diagonal = tl.minimum(tl.cdiv((tile + 1) * N, M), last)  # up to here a mask is needed
        whole = tl.maximum(whole, diagonal)
    dk_tile = tl.zeros([N, D], tl.float32)
    dv_tile = tl.zeros([N, D], tl.float32)
    if CAUSAL:
        dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, lse, delta, q, q_b, q_h, q_t, do, do_b, do_h,
                                        do_t, bh, heads, keys, first, diagonal, T, lse_rows, scale2, M, SIZE, D,
                                        CAUSAL, True, PRECISION)
    dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, lse, delta, q, q_b, q_h, q_t, do, do_b, do_h,
                                    do_t, bh, heads, keys, diagonal, whole, T, lse_rows, scale2, M, SIZE, D, CAUSAL,
                                    False, PRECISION)
    dk_tile, dv_tile = gather_dk_dv(dk_tile, dv_tile, k_tile, v_tile, lse, delta, q, q_b, q_h, q_t, do, do_b, do_h,
                                    do_t, bh, heads, keys, whole, last, T, lse_rows, scale2, M, SIZE, D, CAUSAL, True,
                                    PRECISION)
    store_tile(dk, dk_b, dk_h, dk_t, bh, heads, keys, T, dk_tile * scale, SIZE, D)
    store_tile(dv, dv_b, dv_h, dv_t, bh, heads, keys, T, dv_tile, SIZE, D)


# fmt: on


def forward_tiles(q: Tensor, length: int) -> Tiles:
    """Tiles of the forward pass by type and head size; shared memory is scarce where the chip is not a data centre's.

    At least 64 queries, so that whole pieces of 64 rows of the log-sum-exp are written.
    """
    size = block_of(q)
    if q.dtype == torch.float32:
        return Tiles(64, 32, 4, 1 if size > 64 else 2)
    if size > 64:
        return Tiles(128, 64, 8, 2 if has_room(q) else 1)
    return Tiles(128 if length > 64 else 64, 64, 4, 3 if has_room(q) else 2)


def backward_tiles(q: Tensor, length: int) -> Tiles:
    """Tiles of the backward pass: the second number is of what is kept in registers all along."""
    size = block_of(q)
    if q.dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    if size > 64:
        return Tiles(64, 64, 8, 2 if has_room(q) else 1)
    return Tiles(64, 64, 4, 2)


def has_room(q: Tensor) -> bool:
    """Whether the chip has the shared memory of A100, H100 and their successors (160 KiB and more a program)."""
    return not q.is_cuda or torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin > 128 * 1024


def block_of(q: Tensor) -> int:
    """The head size filled up to a power of two, of which matrix products take 16 and more."""
    return max(16, triton.next_power_of_2(q.shape[-1]))


def precision_of(q: Tensor) -> str:
    """Of matrix products of float32: whole, unless PyTorch's own may round to TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def lse_rows_of(length: int) -> int:
    """Rows of a log-sum-exp."""
    return triton.cdiv(length, 128) * 128


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor, tiles: Tiles | None = None):
    """Output and log-sum-exp; see `lmcore.kernels.attention.attention_forward`."""
    batch, heads, length, size = q.shape
    lse = torch.empty(batch, heads, lse_rows_of(length), device=q.device, dtype=torch.float32)
    m, n, warps, stages = tiles or forward_tiles(q, length)
    attention_forward_kernel[(triton.cdiv(length, m) * batch * heads,)](
        q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], heads, length,
        lse.shape[-1], LOG2_E / math.sqrt(size), m, n, size, block_of(q), causal, precision_of(q), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, dq: Tensor, dk: Tensor,
    dv: Tensor, tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients into dq, dk and dv; see `lmcore.kernels.attention.attention_backward`. `tiles` of dQ, and of dK, dV."""
    batch, heads, length, size = q.shape
    delta, scale, rows = torch.empty_like(lse), 1 / math.sqrt(size), lse.shape[-1]
    of_queries, of_keys = tiles or (backward_tiles(q, length),) * 2
    strides = {name: x.stride()[:3] for name, x in {"q": q, "k": k, "v": v, "o": o, "do": do}.items()}
    common = (heads, length, rows, scale * LOG2_E, scale)
    sizes = (size, block_of(q), causal, precision_of(q))
    n, m, warps, stages = of_queries
    attention_query_gradients_kernel[(triton.cdiv(length, m) * batch * heads,)](
        q, k, v, o, do, dq, lse, delta, *strides["q"], *strides["k"], *strides["v"], *strides["o"], *strides["do"],
        *dq.stride()[:3], *common, m, n, *sizes, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    m, n, warps, stages = of_keys
    attention_key_gradients_kernel[(triton.cdiv(length, n) * batch * heads,)](
        q, k, v, do, dk, dv, lse, delta, *strides["q"], *strides["k"], *strides["v"], *strides["do"],
        *dk.stride()[:3], *dv.stride()[:3], *common, m, n, *sizes, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
