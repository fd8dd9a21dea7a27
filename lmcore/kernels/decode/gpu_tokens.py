"""Triton kernels that take the next token from the logits, and make it the input of the next step; see `decode`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmcore.config import GenerateConfig
from lmcore.kernels.common.overlap import early, launch_options
from lmcore.kernels.decode import Sequences

MAX_SAMPLED = 1 << 14
"""The logits of a row are held in the registers of one program."""


@triton.jit
def _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr, capacity,
                slots, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Notes the token and makes it the input of the next step."""
    step = tl.load(steps_ptr + row)
    tl.store(tokens_ptr + (step % capacity) * batch + row, token)
    tl.store(steps_ptr + row, step + 1)
    position = tl.load(positions_ptr + row)
    tl.store(positions_ptr + row, tl.minimum(position + 1, slots - 1))
    d = tl.arange(0, BLOCK_D)
    source = embedding_ptr + tl.maximum(token, 0).to(tl.int64) * D
    x = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * D + d, x, mask=d < D)
    tl.store(copy_ptr + row * D + d, x, mask=d < D)


@triton.jit
def _greedy_kernel(
    logits_ptr,  # (B, V)
    tokens_ptr,  # (capacity, B)
    steps_ptr,  # (B,)
    positions_ptr,  # (B,)
    embedding_ptr,  # (V, D)
    x_ptr,  # (B, D)
    copy_ptr,  # (B, D)
    batch,
    vocab,
    num_ids,
    capacity,
    slots,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first of the largest logits; -1 if one is not finite."""
    row = tl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_ids, BLOCK):
        i = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * vocab + i, mask=i < num_ids, other=-3e38)
        wrong += tl.where(tl.abs(logits) < float("inf"), 0, 1)
        better = logits > best
        best = tl.where(better, logits, best)
        ids = tl.where(better, i, ids)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, num_ids), 0)
    token = tl.where(tl.sum(wrong, 0) > 0, -1, token)
    _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr, capacity,
                slots, D, BLOCK_D)  # fmt: skip


@triton.jit
def _key_where_reached(keys, mass, target, STRICT: tl.constexpr):
    """The largest key such that the mass of all keys from it on reaches (STRICT: exceeds) the target; by bisection."""
    key = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 1 << 31, tl.uint32)
    for _ in tl.range(0, 32):
        candidate = key | bit
        bit = bit >> 1
        reached = tl.sum(tl.where(keys >= candidate, mass, 0.0), 0)
        enough = reached > target if STRICT else reached >= target
        key = tl.where(enough, candidate, key)
    return key


@triton.jit
def _sampled_kernel(
    logits_ptr,  # (B, V)
    uniforms_ptr,  # (capacity, B)
    tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr, batch, vocab, num_ids, capacity, slots,
    temperature, top_p, top_k,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The token for a uniform number in the order of falling probability, without sorting.

    Logits become integers of the same order. What is asked for is always: where, going down from the largest, does
    the probability (for top-k: the count) reach a target? Among equal logits the lower id comes first.
    """
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    inside = i < num_ids
    logits = tl.load(logits_ptr + row * vocab + i, mask=inside, other=float("-inf"))
    wrong = tl.sum(tl.where(inside & ~(tl.abs(logits) < float("inf")), 1, 0), 0)
    logits = tl.where(logits == 0, 0.0, logits)  # -0 is not less than 0
    bits = logits.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    mass = tl.where(inside, tl.exp((logits - tl.max(logits, 0)) / temperature), 0.0)
    # of the kept: the last key, how many of the equal ones there, and the probability of all
    last = tl.min(tl.where(mass > 0, keys, 0xFFFFFFFF), 0)
    kept = tl.sum(tl.where(keys == last, 1, 0), 0)
    total = tl.sum(mass, 0)
    if TOP_K:
        last = tl.max(_key_where_reached(keys, tl.where(inside, 1.0, 0.0), top_k * 1.0, False), 0)
        kept = top_k - tl.sum(tl.where(keys > last, 1, 0), 0)
        p = tl.max(tl.where(keys == last, mass, 0.0), 0)
        total = tl.sum(tl.where(keys > last, mass, 0.0), 0) + kept * p
    if TOP_P:
        nucleus = tl.max(_key_where_reached(keys, mass, top_p * total, False), 0)
        below = nucleus > last
        last = tl.maximum(last, nucleus)
        before = tl.sum(tl.where(keys > last, mass, 0.0), 0)
        p = tl.max(tl.where(keys == last, mass, 0.0), 0)
        limit = tl.where(below, tl.sum(tl.where(keys == last, 1, 0), 0), kept)
        kept = tl.minimum(tl.maximum(tl.ceil((top_p * total - before) / p).to(tl.int32), 1), limit)
        total = before + kept * p
    u = tl.load(uniforms_ptr + (tl.load(steps_ptr + row) % capacity) * batch + row)
    here = tl.maximum(tl.max(_key_where_reached(keys, mass, u * total, True), 0), last)
    equal = keys == here
    p = tl.max(tl.where(equal, mass, 0.0), 0)
    before = tl.sum(tl.where(keys > here, mass, 0.0), 0)
    limit = tl.where(here == last, kept, tl.sum(tl.where(equal, 1, 0), 0))
    index = tl.minimum(tl.maximum(tl.floor((u * total - before) / p).to(tl.int32), 0), limit - 1)
    rank = tl.cumsum(tl.where(equal, 1, 0), 0)
    token = tl.sum(tl.where(equal & (rank == index + 1), i, 0), 0)
    token = tl.where(wrong > 0, -1, token)
    _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr, capacity,
                slots, D, BLOCK_D)  # fmt: skip


@triton.jit
def _advance_kernel(
    chosen_ptr,  # (B,)
    tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr, batch, capacity, slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.load(chosen_ptr + row).to(tl.int32)
    _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr, capacity,
                slots, D, BLOCK_D)  # fmt: skip


def tensors_of(sequences: Sequences) -> tuple[Tensor, ...]:
    """All of its tensors, in the kernels' order."""
    return sequences[:6]


def sizes_of(sequences: Sequences) -> tuple[int, int]:
    """Capacity of the ring of tokens, and slots of the cache."""
    return len(sequences.tokens), sequences.num_slots


def widths_of(sequences: Sequences) -> dict[str, int]:
    """d_model, and the power of two that holds it."""
    d_model = sequences.x.shape[1]
    return {"D": d_model, "BLOCK_D": triton.next_power_of_2(d_model)}


def greedy(logits: Tensor, num_ids: int, sequences: Sequences, overlap: bool = False) -> None:
    """See `lmcore.kernels.decode.greedy`."""
    batch, vocab = logits.shape
    device = logits.device
    block = min(8192, triton.next_power_of_2(num_ids))
    _greedy_kernel[(batch,)](
        logits, *tensors_of(sequences), batch, vocab, num_ids, *sizes_of(sequences),
        BLOCK=block, EARLY=early(device), num_warps=16 if block > 2048 else 4,
        **widths_of(sequences), **launch_options(device, overlap),
    )  # fmt: skip


def advance(chosen: Tensor, sequences: Sequences) -> None:
    """See `lmcore.kernels.decode.advance`."""
    batch = len(chosen)
    _advance_kernel[(batch,)](
        chosen, *tensors_of(sequences), batch, *sizes_of(sequences), num_warps=4, **widths_of(sequences)
    )  # fmt: skip


def sampled(
    logits: Tensor,
    num_ids: int,
    config: GenerateConfig,
    uniforms: Tensor,
    sequences: Sequences,
    overlap: bool = False,
) -> None:
    """See `lmcore.kernels.decode.sampled`."""
    batch, vocab = logits.shape
    device = logits.device
    block = triton.next_power_of_2(num_ids)
    cut = config.top_k is not None and config.top_k < num_ids
    _sampled_kernel[(batch,)](
        logits, uniforms, *tensors_of(sequences), batch, vocab, num_ids, *sizes_of(sequences),
        max(config.temperature, torch.finfo(torch.float32).tiny), config.top_p,
        config.top_k if cut else 0,
        BLOCK=block, TOP_K=cut, TOP_P=config.top_p < 1, EARLY=early(device), num_warps=32 if block > 8192 else 8,
        **widths_of(sequences), **launch_options(device, overlap),
    )  # fmt: skip
