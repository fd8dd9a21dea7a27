"""Triton kernels of one decoding step; `lmcore.kernels.decode` says what each computes.

A step of a small model is a chain of kernels of a few microseconds, so each one is arranged to begin before the one
in front of it has ended (programmatic dependent launch, CUDA programming guide section 4.5): it first loads its
weights and the cache of earlier positions, which nothing in this step changes, and only then waits for its input.
Every weight is read once, whatever the number of rows.

Shape letters: B rows (sequences), D d_model, H heads, K head size, S slots of the cache, F d_ff, V vocabulary,
M outputs of a matrix, N its inputs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmcore.kernels.common.overlap import early, launch_options
from lmcore.kernels.decode.gpu_linear import linear
from lmcore.kernels.decode.gpu_tokens import MAX_SAMPLED, advance, greedy, sampled

__all__ = ["MAX_SAMPLED", "advance", "attend", "greedy", "linear", "sampled"]

BLOCK_ELEMENTS = 16 * 1024
"""Of the keys, and of the values, that a program holds at once: 64 registers of its 256 threads."""


@triton.jit
def _attend_kernel(
    qkv_ptr,  # (B, 3D)
    cos_ptr,  # (positions, K / 2)
    sin_ptr,
    keys_ptr,  # (B, H, S, K)
    values_ptr,
    positions_ptr,  # (B,)
    heads_ptr,  # (B, D), or (SPLITS, B, D) in float32 with
    lse_ptr,  # (SPLITS, B, H)
    batch,
    heads,
    slots,
    scale,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One query of one head over every SPLITS-th block of its keys; of the new key too where it falls into one."""
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, WIDTH)
    feature = i < HEAD_SIZE
    position = tl.load(positions_ptr + row)
    base = (row * heads + head).to(tl.int64) * slots * HEAD_SIZE
    t = split * BLOCK + tl.arange(0, BLOCK)
    seen = (t < position)[:, None] & feature[None, :]
    keys = tl.load(keys_ptr + base + t[:, None] * HEAD_SIZE + i[None, :], mask=seen, other=0.0)
    values = tl.load(values_ptr + base + t[:, None] * HEAD_SIZE + i[None, :], mask=seen, other=0.0)
    cos = tl.load(cos_ptr + position * (HEAD_SIZE // 2) + i // 2, mask=feature, other=0.0)
    sin = tl.load(sin_ptr + position * (HEAD_SIZE // 2) + i // 2, mask=feature, other=0.0)
    sin = tl.where(i % 2 == 0, -sin, sin)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    width = heads * HEAD_SIZE
    q_ptr = qkv_ptr + row * 3 * width + head * HEAD_SIZE
    k_ptr = q_ptr + width
    pair = i + 1 - 2 * (i % 2)  # the other feature of the pair that turns together
    q = tl.load(q_ptr + i, mask=feature, other=0.0) * cos
    q += tl.load(q_ptr + pair, mask=feature, other=0.0) * sin
    q *= scale * 1.4426950408889634  # log2(e): powers of two below
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    o = tl.zeros([WIDTH], tl.float32)
    if (position // BLOCK) % SPLITS == split:
        k = tl.load(k_ptr + i, mask=feature, other=0.0) * cos
        k += tl.load(k_ptr + pair, mask=feature, other=0.0) * sin
        v = tl.load(k_ptr + width + i, mask=feature, other=0.0)
        k = k.to(keys_ptr.dtype.element_ty)
        v = v.to(values_ptr.dtype.element_ty)
        tl.store(keys_ptr + base + position * HEAD_SIZE + i, k, mask=feature)
        tl.store(values_ptr + base + position * HEAD_SIZE + i, v, mask=feature)
        top = tl.zeros([1], tl.float32) + tl.sum(q * k.to(tl.float32), 0)
        total += 1.0
        o += v.to(tl.float32)
    for start in tl.range(split * BLOCK, position, SPLITS * BLOCK):
        if start > split * BLOCK:
            t = start + tl.arange(0, BLOCK)
            seen = (t < position)[:, None] & feature[None, :]
            keys = tl.load(keys_ptr + base + t[:, None] * HEAD_SIZE + i[None, :], mask=seen, other=0.0)
            values = tl.load(values_ptr + base + t[:, None] * HEAD_SIZE + i[None, :], mask=seen, other=0.0)
        scores = tl.sum(keys.to(tl.float32) * q[None, :], 1)
        scores = tl.where(t < position, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        p = tl.exp2(scores - higher)
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(p, 0)
        o = o * old + tl.sum(p[:, None] * values.to(tl.float32), 0)
        top = higher
    at = (split * batch + row) * heads + head
    if SPLITS > 1:  # a part may have no keys
        some = total > 0
        total = tl.where(some, total, 1.0)
        tl.store(lse_ptr + at + tl.arange(0, 1), tl.where(some, top + tl.log2(total), float("-inf")))
    tl.store(heads_ptr + at * HEAD_SIZE + i, o / total, mask=feature)


@triton.jit
def _combine_kernel(
    parts_ptr,  # (SPLITS, B, D)
    lse_ptr,  # (SPLITS, B, H), to the base 2
    heads_ptr,  # (B, D)
    count,  # B * H
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Heads from the parts of their keys: sum of parts weighted by the exponentials of their lse, over their sum."""
    head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    i = tl.arange(0, WIDTH)
    feature = i < HEAD_SIZE
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    lse = tl.load(lse_ptr + s * count + head)
    shares = tl.exp2(lse - tl.max(lse, 0))
    at = (s[:, None] * count + head) * HEAD_SIZE + i[None, :]
    parts = tl.load(parts_ptr + at, mask=feature[None, :], other=0.0)
    combined = tl.sum(parts * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(heads_ptr + head * HEAD_SIZE + i, combined, mask=feature)


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    heads: Tensor,
    parts: Tensor | None = None,
    lse: Tensor | None = None,
    overlap: bool = False,
) -> None:
    batch, num_heads, slots, head_size = keys.shape
    splits = 1 if parts is None else parts.shape[0]
    width = max(16, triton.next_power_of_2(head_size))
    options = {"HEAD_SIZE": head_size, "WIDTH": width, "SPLITS": splits, "EARLY": early(qkv.device)}
    block = min(BLOCK_ELEMENTS // width, max(16, triton.next_power_of_2(slots)))
    _attend_kernel[(num_heads, splits, batch)](
        qkv, cos, sin, keys, values, positions, heads if parts is None else parts, heads if lse is None else lse,
        batch, num_heads, slots, head_size**-0.5, BLOCK=block, num_warps=8,
        **options, **launch_options(qkv.device, overlap),
    )  # fmt: skip
    if parts is not None:
        count = batch * num_heads
        _combine_kernel[(count,)](
            parts, lse, heads, count, num_warps=1, **options, **launch_options(qkv.device, overlap)
        )
