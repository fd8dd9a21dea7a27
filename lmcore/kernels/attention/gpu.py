"""FlashAttention-2 in Triton, for every CUDA chip (Dao 2023). The mathematics is that of `attention_tiled`.

The backward pass has two parts: dQ by tiles of queries, and dK with dV by tiles of keys. Each output is written by one
program alone, in a fixed order, so that results repeat bit by bit; the price is that scores are computed once more.

Tensors are batch × heads × positions × head size with any strides whose last is 1. The log-sum-exp is in base 2, of
batch × heads × rows in float32; rows behind the last position hold infinity, which makes their probabilities zero.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lmcore.kernels.attention.gpu_backward import attention_backward_kernel
from lmcore.kernels.attention.gpu_forward import LOG2_E, attention_forward_kernel

FEW_TILES = 512
"""Tiles of 64 positions, over all heads, that do not fill the H200."""


class Tiles(NamedTuple):
    """Positions that a program keeps, positions of a tile that passes by, warps, and stages of its loads."""

    kept: int
    passing: int
    warps: int
    stages: int


def forward_tiles(q: Tensor) -> Tiles:
    """Tiles of the forward pass by type and head size, by measurement on the H200."""
    size = block_of(q)
    if q.dtype == torch.float32:
        return Tiles(64, 32, 4, 1 if size > 64 else 2)
    stages = 3 if has_room(q) else 2
    return Tiles(64, 32, 4, stages) if size <= 32 else Tiles(64, 64, 4, stages if size <= 64 else 2)


def backward_tiles(q: Tensor) -> dict[str, Tiles]:
    """Tiles of the parts of the backward pass: positions of a tile, and of those that pass by.

    Where a launch costs more than delta's second computation, one launch does both parts.
    """
    batch, heads, length, _ = q.shape
    size = block_of(q)
    if q.dtype == torch.float32:
        return dict.fromkeys(("queries", "keys"), Tiles(32, 32, 4, 1))
    if size <= 64 and triton.cdiv(length, 64) * batch * heads <= FEW_TILES:
        return {"both": Tiles(64, 64 if size == 64 else 32, 4, 2)}
    stages = 3 if has_room(q) and size <= 64 else 2
    keys = 32 if size <= 32 or size > 64 else 64
    return {"queries": Tiles(64, 64 if size > 32 else 32, 4, stages), "keys": Tiles(64, keys, 4, 2)}


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


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor, tiles: Tiles | None = None):
    """Output and log-sum-exp; see `lmcore.kernels.attention.attention_forward`."""
    batch, heads, length, size = q.shape
    lse = torch.empty(batch, heads, lse_rows_of(length), device=q.device, dtype=torch.float32)
    m, n, warps, stages = tiles or forward_tiles(q)
    attention_forward_kernel[(triton.cdiv(length, m) * batch * heads,)](
        q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], batch * heads,
        heads, heads_of_group(q, causal), length, lse.shape[-1], LOG2_E.value / math.sqrt(size), m, n, size,
        block_of(q), causal, precision_of(q), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, dq: Tensor, dk: Tensor,
    dv: Tensor, tiles: dict[str, Tiles] | None = None, angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients into dq, dk and dv; see `lmcore.kernels.attention.attention_backward`. `tiles` by part."""
    batch, heads, length, size = q.shape
    delta = torch.empty_like(lse)
    strides = [stride for x in (q, k, v, o, do, dq, dk, dv) for stride in x.stride()[:3]]
    group = heads_of_group(q, causal)
    for part, (m, n, warps, stages) in (tiles or backward_tiles(q)).items():
        programs = triton.cdiv(length, m) * batch * heads * (2 if part == "both" else 1)
        attention_backward_kernel[(programs,)](
            q, k, v, o, do, dq, dk, dv, lse, delta, *(angles or (lse, lse)), *strides, batch * heads, heads, group,
            length, lse.shape[-1], 1 / math.sqrt(size), m, n, size, block_of(q), causal, angles is not None,
            precision_of(q), part, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv
