"""FlashAttention-2 on Hopper for half precision: the launches of its kernels, with what `attention` has for the rest.

The log-sum-exp is that of `lmcore.kernels.attention.gpu`, so that either module's backward pass takes it.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lmcore.kernels.attention import gpu as attention
from lmcore.kernels.attention.gpu import block_of, heads_of_group, lse_rows_of
from lmcore.kernels.attention.gpu_forward import LOG2_E
from lmcore.kernels.attention.gpu_sums import attention_finish_kernel, attention_prepare_kernel
from lmcore.kernels.attention.hopper_backward import attention_backward_kernel
from lmcore.kernels.attention.hopper_forward import attention_forward_kernel
from lmcore.kernels.common.hopper import depth_of, is_aligned, row_descriptor, tile_descriptor

PRODUCER_REGISTERS = 24
"""Of a thread: the producer hands the others to the consumers."""


class Tiles(NamedTuple):
    """Queries and keys of a tile, buffers of a ring, registers of a consumer's thread and, all warps' mean, at launch.

    `key_buffers`, of the backward pass: with two, one program a multiprocessor claims one tile of keys after the other,
    and loads the next one meanwhile.

    Two warpgroups of consumers fill the multiprocessor's registers with a mean of 168, and half of them with 80; three
    fill them with 128; a single one fills half of them with 128, and a third with 80. Where several programs share a
    multiprocessor, one computes while others start or end.
    """

    queries: int
    keys: int
    stages: int = 2
    registers: int = 240
    mean_registers: int = 168
    key_buffers: int = 1


SHORT, LONG = 256, 4096
"""Positions up to which the start of a program matters most, and from which large tiles are worth their start."""


def forward_tiles(size: int, length: int) -> Tiles:
    """By measurement on the H200; `size` is a power of two.

    A warpgroup skips at most (queries - 64) / keys tiles, rounded up, which must be less than there are buffers.
    """
    if size <= 32:
        return Tiles(128, 64, 2, 104, 80)
    if size == 64:
        return Tiles(192, 128, 2, 160, 128) if length >= LONG else Tiles(64, 64, 2, 136, 80)
    return Tiles(64, 64, 2, 232, 128) if length <= 2 * SHORT else Tiles(128, 128)


def backward_tiles(size: int) -> Tiles:
    """By measurement on the H200; `size` is a power of two."""
    if size <= 32:
        return Tiles(128, 128)
    return Tiles(64, 128, key_buffers=2 if size == 64 else 1)


def portable_is_faster(q: Tensor, forward: bool) -> bool:
    """Where many small programs beat few large ones: short sequences of small heads, and few programs at all."""
    batch, heads, length, size = q.shape
    few = not forward and triton.cdiv(length, 64) * batch * heads <= attention.FEW_TILES
    return length <= SHORT and (size <= 32 or (size <= 64 and few))


def readable(x: Tensor) -> Tensor:
    """`x`, copied if TMA cannot read it."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see `lmcore.kernels.attention.attention_forward`."""
    if tiles is None and portable_is_faster(q, forward=True):
        return attention.forward(q, k, v, causal, out)
    batch, heads, length, size = q.shape
    q, k, v = readable(q), readable(k), readable(v)
    o = out if is_aligned(out) else torch.empty_like(q, memory_format=torch.contiguous_format)
    rows, block = lse_rows_of(length), block_of(q)
    lse = torch.empty(batch, heads, rows, device=q.device, dtype=torch.float32)
    m, n, stages, registers, mean, _ = tiles or forward_tiles(block, length)
    attention_forward_kernel[(triton.cdiv(length, m) * batch * heads,)](
        tile_descriptor(q, 64, block), tile_descriptor(k, n, block), tile_descriptor(v, n, block),
        tile_descriptor(o, 64, block), lse, batch * heads, heads, heads_of_group(q, causal), length, rows,
        LOG2_E.value / math.sqrt(size), m // 64, n, block, depth_of(size, block), stages, causal, registers,
        PRODUCER_REGISTERS, num_warps=4, maxnreg=mean,
    )  # fmt: skip
    return (out if o is out else out.copy_(o)), lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, dq: Tensor, dk: Tensor,
    dv: Tensor, tiles: Tiles | None = None, angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients into dq, dk and dv. The sum of dQ's parts has no fixed order: its last bits may differ."""
    if tiles is None and portable_is_faster(q, forward=False):
        return attention.backward(q, k, v, o, lse, do, causal, dq, dk, dv, angles=angles)
    batch, heads, length, size = q.shape
    q, k, v, do = readable(q), readable(k), readable(v), readable(do)
    made = [x if is_aligned(x) else torch.empty_like(k, memory_format=torch.contiguous_format) for x in (dk, dv)]
    rows, block = lse.shape[-1], max(32, block_of(q))
    delta, scale = torch.empty_like(lse), 1 / math.sqrt(size)
    sums = torch.empty(batch, heads, length, size, device=q.device, dtype=torch.float32)
    counter = torch.empty(1, device=q.device, dtype=torch.int32)
    attention_prepare_kernel[(triton.cdiv(rows, 32) * batch * heads,)](
        o, do, delta, sums, counter, *o.stride()[:3], *do.stride()[:3], heads, length, rows, size, block_of(q), 32
    )
    m, n, stages, registers, mean, buffers = tiles or backward_tiles(block)
    programs = triton.cdiv(length, n) * batch * heads
    if buffers > 1:
        programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    attention_backward_kernel[(programs,)](
        tile_descriptor(q, m, block), tile_descriptor(do, m, block), tile_descriptor(k, n, block),
        tile_descriptor(v, n, block), row_descriptor(lse.flatten(0, 1), m), row_descriptor(delta.flatten(0, 1), m),
        tile_descriptor(sums, m, block // 2), tile_descriptor(made[0], n // 2, block),
        tile_descriptor(made[1], n // 2, block), counter, batch * heads, heads,
        heads_of_group(q, causal, backward=True), length, scale * LOG2_E.value, scale, m, n, block,
        depth_of(size, block), stages, buffers, causal, registers, PRODUCER_REGISTERS, num_warps=4, maxnreg=mean,
    )  # fmt: skip
    for given, computed in zip((dk, dv), made, strict=True):
        if given is not computed:
            given.copy_(computed)
    attention_finish_kernel[(triton.cdiv(length, 32) * batch * heads,)](
        sums, dq, dk, *(angles or (lse, lse)), *dq.stride()[:3], *dk.stride()[:3], heads, length, scale, size,
        block_of(q), 32, angles is not None,
    )  # fmt: skip
    return dq, dk, dv
