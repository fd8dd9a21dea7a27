"""Triton kernels of one decoding step; `lmcore.kernels.decode` says what each computes.

A step of a small model is a chain of kernels of a few microseconds, so each one is arranged to begin before the one
in front of it has ended (programmatic dependent launch, CUDA programming guide section 4.5): it first loads its
weights and the cache of earlier positions, which nothing in this step changes, and only then waits for its input.
Every weight is read once, whatever the number of rows.

Shape letters: B rows (sequences), D d_model, H heads, K head size, S slots of the cache, F d_ff, V vocabulary,
M outputs of a matrix, N its inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmcore.config import GenerateConfig

VECTOR_ROWS = 4
"""Up to so many rows the products are sums in registers; above, tiles for the tensor cores."""


@triton.jit
def _input(x_ptr, lse_ptr, row, i, mask, batch, width, SPLITS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Features `i` of row `row` of the input: x itself, or heads put together from the parts of their keys.

    Part s has the output o_s and the log-sum-exp l_s of its scores: o = sum(exp(l_s) o_s) / sum(exp(l_s)).
    Past L1 (.cg), whose lines may be from before the kernel in front of this one.
    """
    if SPLITS == 1:
        return tl.load(x_ptr + row * width + i, mask=mask, other=0.0, cache_modifier=".cg")
    heads = width // HEAD_SIZE
    top = tl.full(i.shape, float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        at = (s * batch + row) * heads + i // HEAD_SIZE
        top = tl.maximum(top, tl.load(lse_ptr + at, mask=mask, other=0.0, cache_modifier=".cg"))
    total = tl.zeros(i.shape, tl.float32)
    weighted = tl.zeros(i.shape, tl.float32)
    for s in tl.static_range(SPLITS):
        at = (s * batch + row) * heads + i // HEAD_SIZE
        share = tl.exp(tl.load(lse_ptr + at, mask=mask, other=0.0, cache_modifier=".cg") - top)
        part = tl.load(x_ptr + (s * batch + row) * width + i, mask=mask, other=0.0, cache_modifier=".cg")
        total += share
        weighted += share * part
    return weighted / total


@triton.jit
def _vector_kernel(
    x_ptr,  # (B, N), or (SPLITS, B, N) with lse_ptr (SPLITS, B, H)
    lse_ptr,
    gain_ptr,  # (N,)
    w_ptr,  # (M, N), or (2M, N) when gated
    out_ptr,  # (B, M)
    eps,
    M: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Matrix times few vectors: a program holds all of ROWS rows of the matrix in registers."""
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = w_ptr + rows.to(tl.int64)[:, None] * N
    w, gate, gain = (), (), ()
    for c in tl.static_range(CHUNKS):
        i = c * CHUNK + tl.arange(0, CHUNK)
        inside = (rows < M)[:, None] & (i < N)[None, :]
        w += (tl.load(base + i[None, :], mask=inside, other=0.0),)
        if GATED:
            gate += (tl.load(base + M * N + i[None, :], mask=inside, other=0.0),)
        if NORM:
            gain += (tl.load(gain_ptr + i, mask=i < N, other=0.0),)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for b in tl.static_range(B):
        y = tl.zeros([ROWS, CHUNK], tl.float32)
        z = tl.zeros([ROWS, CHUNK], tl.float32)
        squares = tl.zeros([CHUNK], tl.float32)
        for c in tl.static_range(CHUNKS):
            i = c * CHUNK + tl.arange(0, CHUNK)
            x = _input(x_ptr, lse_ptr, b, i, i < N, B, N, SPLITS, HEAD_SIZE)
            if NORM:
                squares += x * x
                x = x * gain[c].to(tl.float32)
            y += w[c].to(tl.float32) * x[None, :]
            if GATED:
                z += gate[c].to(tl.float32) * x[None, :]
        out = tl.sum(y, 1)
        scale = 1.0
        if NORM:  # the same for all features, so it can come after the product
            scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / N + eps)
            out = out * scale
        if GATED:
            out = out / (1.0 + tl.exp(-out)) * (tl.sum(z, 1) * scale)
        if ADD:
            out += tl.load(out_ptr + b * M + rows, mask=rows < M, cache_modifier=".cg")
        tl.store(out_ptr + b * M + rows, out, mask=rows < M)


@triton.jit
def _tile_kernel(
    x_ptr,
    lse_ptr,
    gain_ptr,
    w_ptr,
    out_ptr,
    eps,
    batch,
    M: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The same for many vectors, BATCH at a time, on the tensor cores."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    base = w_ptr + rows.to(tl.int64)[:, None] * N
    y = tl.zeros([ROWS, BATCH], tl.float32)
    z = tl.zeros([ROWS, BATCH], tl.float32)
    squares = tl.zeros([BATCH], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, N, CHUNK):
        i = start + tl.arange(0, CHUNK)
        inside = (rows < M)[:, None] & (i < N)[None, :]
        w = tl.load(base + i[None, :], mask=inside, other=0.0)
        mask = (i < N)[:, None] & (b < batch)[None, :]
        x = _input(
            x_ptr, lse_ptr, b[None, :] + 0 * i[:, None], i[:, None] + 0 * b[None, :], mask, batch, N, SPLITS, HEAD_SIZE
        )
        x = tl.where(mask, x, 0.0)
        if NORM:
            squares += tl.sum(x * x, 0)
            x = x * tl.load(gain_ptr + i, mask=i < N, other=0.0).to(tl.float32)[:, None]
        x = x.to(w.dtype)
        y = tl.dot(w, x, y, input_precision="ieee")
        if GATED:
            gate = tl.load(base + M * N + i[None, :], mask=inside, other=0.0)
            z = tl.dot(gate, x, z, input_precision="ieee")
    if NORM:
        scale = 1.0 / tl.sqrt(squares / N + eps)
        y = y * scale[None, :]
        z = z * scale[None, :]
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * z
    at = out_ptr + b[None, :] * M + rows[:, None]
    mask = (rows < M)[:, None] & (b < batch)[None, :]
    if ADD:
        y += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(at, y, mask=mask)


@triton.jit
def _attend_kernel(
    qkv_ptr,  # (B, 3D)
    cos_ptr,  # (positions, K / 2)
    sin_ptr,
    keys_ptr,  # (B, H, S, K)
    values_ptr,
    positions_ptr,  # (B,)
    parts_ptr,  # (SPLITS, B, D)
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
    q = tl.load(q_ptr + i, mask=feature, other=0.0, cache_modifier=".cg") * cos
    q += tl.load(q_ptr + pair, mask=feature, other=0.0, cache_modifier=".cg") * sin
    q *= scale * 1.4426950408889634  # log2(e): powers of two below
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    o = tl.zeros([WIDTH], tl.float32)
    if (position // BLOCK) % SPLITS == split:
        k = tl.load(k_ptr + i, mask=feature, other=0.0, cache_modifier=".cg") * cos
        k += tl.load(k_ptr + pair, mask=feature, other=0.0, cache_modifier=".cg") * sin
        v = tl.load(k_ptr + width + i, mask=feature, other=0.0, cache_modifier=".cg")
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
    some = total > 0
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    at = (split * batch + row) * heads + head
    tl.store(lse_ptr + at + tl.arange(0, 1), lse)
    tl.store(parts_ptr + at * HEAD_SIZE + i, o / tl.where(some, total, 1.0), mask=feature)


@triton.jit
def _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, capacity, slots,
                D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Notes the token and makes it the input of the next step."""
    step = tl.load(steps_ptr + row)
    tl.store(tokens_ptr + (step % capacity) * batch + row, token)
    tl.store(steps_ptr + row, step + 1)
    position = tl.load(positions_ptr + row)
    tl.store(positions_ptr + row, tl.minimum(position + 1, slots - 1))
    d = tl.arange(0, BLOCK_D)
    source = embedding_ptr + tl.maximum(token, 0).to(tl.int64) * D
    tl.store(x_ptr + row * D + d, tl.load(source + d, mask=d < D, other=0.0).to(tl.float32), mask=d < D)


@triton.jit
def _greedy_kernel(
    logits_ptr,  # (B, V)
    tokens_ptr,  # (capacity, B)
    steps_ptr,  # (B,)
    positions_ptr,  # (B,)
    embedding_ptr,  # (V, D)
    x_ptr,  # (B, D)
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
        logits = tl.load(logits_ptr + row * vocab + i, mask=i < num_ids, other=-3e38, cache_modifier=".cg")
        wrong += tl.where(tl.abs(logits) < float("inf"), 0, 1)
        better = logits > best
        best = tl.where(better, logits, best)
        ids = tl.where(better, i, ids)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, num_ids), 0)
    token = tl.where(tl.sum(wrong, 0) > 0, -1, token)
    _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, capacity, slots,
                D, BLOCK_D)  # fmt: skip


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
    tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, batch, vocab, num_ids, capacity, slots,
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
    logits = tl.load(logits_ptr + row * vocab + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
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
    _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, capacity, slots,
                D, BLOCK_D)  # fmt: skip


@triton.jit
def _advance_kernel(
    chosen_ptr,  # (B,)
    tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, batch, capacity, slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.load(chosen_ptr + row).to(tl.int32)
    _begin_next(token, row, batch, tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, capacity, slots,
                D, BLOCK_D)  # fmt: skip


def early(device: torch.device) -> bool:
    """Whether kernels on this device can begin before the one in front of them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _launch_options(device: torch.device, overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap and early(device) else {}


def _vector_tile(num_outputs: int, num_inputs: int, itemsize: int, matrices: int) -> tuple[int, int, int]:
    """(rows of a program, inputs at a time, warps): about 24 KiB of weights for each program.

    So much fits into the registers of four warps, and several programs on a multiprocessor keep its loads in flight.
    A warp takes 16 bytes a thread of one row at a time.
    """
    row_bytes = num_inputs * itemsize * matrices
    rows = 16
    while rows > 1 and (rows * row_bytes > 24 * 1024 or num_outputs // rows < 132):
        rows //= 2
    warps = 4 if rows * row_bytes <= 48 * 1024 else 8
    chunk = max(512 // itemsize, 512 // itemsize * warps // rows)
    return rows, chunk, warps


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    gain: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    lse: Tensor | None = None,
    eps: float = 1e-5,
    overlap: bool = False,
) -> None:
    """All matrix products of a step: with a norm before, a gate or a residual sum after it, or heads to combine."""
    batch, num_outputs = out.shape
    num_inputs = weight.shape[1]
    splits, head_size = (1, 1) if lse is None else (lse.shape[0], num_inputs // lse.shape[2])
    options = {
        "M": num_outputs, "N": num_inputs, "NORM": gain is not None, "GATED": gated, "ADD": add, "SPLITS": splits,
        "HEAD_SIZE": head_size, "EARLY": early(out.device), **_launch_options(out.device, overlap),
    }  # fmt: skip
    pointers = (x, x if lse is None else lse, weight if gain is None else gain, weight, out)
    if batch <= VECTOR_ROWS:
        rows, chunk, warps = _vector_tile(num_outputs, num_inputs, weight.element_size(), 1 + gated)
        grid = (triton.cdiv(num_outputs, rows),)
        _vector_kernel[grid](*pointers, eps, B=batch, ROWS=rows, CHUNK=chunk, num_warps=warps, **options)
        return
    width = min(64, max(16, triton.next_power_of_2(batch)))
    rows = 64 if num_outputs >= 64 * 132 else 32 if num_outputs >= 32 * 132 else 16
    grid = (triton.cdiv(num_outputs, rows), triton.cdiv(batch, width))
    _tile_kernel[grid](
        *pointers, eps, batch, BATCH=width, ROWS=rows, CHUNK=128 // weight.element_size(),
        num_warps=4, num_stages=3, **options,
    )  # fmt: skip


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parts: Tensor,
    lse: Tensor,
    overlap: bool = False,
) -> None:
    batch, heads, slots, head_size = keys.shape
    splits = parts.shape[0]
    width = max(16, triton.next_power_of_2(head_size))
    _attend_kernel[(heads, splits, batch)](
        qkv, cos, sin, keys, values, positions, parts, lse, batch, heads, slots, head_size**-0.5,
        HEAD_SIZE=head_size, WIDTH=width, BLOCK=4096 // width, SPLITS=splits, EARLY=early(qkv.device),
        num_warps=4, **_launch_options(qkv.device, overlap),
    )  # fmt: skip


def greedy(
    logits: Tensor,
    num_ids: int,
    tokens: Tensor,
    steps: Tensor,
    positions: Tensor,
    embedding: Tensor,
    x: Tensor,
    num_slots: int,
    overlap: bool = False,
) -> None:
    batch, vocab = logits.shape
    d_model = x.shape[1]
    block = min(8192, triton.next_power_of_2(num_ids))
    _greedy_kernel[(batch,)](
        logits, tokens, steps, positions, embedding, x, batch, vocab, num_ids, tokens.shape[0], num_slots,
        D=d_model, BLOCK_D=triton.next_power_of_2(d_model), BLOCK=block, EARLY=early(x.device),
        num_warps=16 if block > 2048 else 4, **_launch_options(x.device, overlap),
    )  # fmt: skip


def advance(
    chosen: Tensor,
    tokens: Tensor,
    steps: Tensor,
    positions: Tensor,
    embedding: Tensor,
    x: Tensor,
    num_slots: int,
) -> None:
    batch, d_model = x.shape
    _advance_kernel[(batch,)](
        chosen, tokens, steps, positions, embedding, x, batch, tokens.shape[0], num_slots,
        D=d_model, BLOCK_D=triton.next_power_of_2(d_model), num_warps=4,
    )  # fmt: skip


MAX_SAMPLED = 1 << 14
"""The logits of a row are held in the registers of one program."""


def sampled(
    logits: Tensor,
    num_ids: int,
    config: GenerateConfig,
    uniforms: Tensor,
    tokens: Tensor,
    steps: Tensor,
    positions: Tensor,
    embedding: Tensor,
    x: Tensor,
    num_slots: int,
    overlap: bool = False,
) -> None:
    batch, vocab = logits.shape
    d_model = x.shape[1]
    block = triton.next_power_of_2(num_ids)
    cut = config.top_k is not None and config.top_k < num_ids
    _sampled_kernel[(batch,)](
        logits, uniforms, tokens, steps, positions, embedding, x, batch, vocab, num_ids, tokens.shape[0], num_slots,
        max(config.temperature, torch.finfo(torch.float32).tiny), config.top_p, config.top_k if cut else 0,
        D=d_model, BLOCK_D=triton.next_power_of_2(d_model), BLOCK=block, TOP_K=cut, TOP_P=config.top_p < 1,
        EARLY=early(x.device), num_warps=32 if block > 8192 else 8, **_launch_options(x.device, overlap),
    )  # fmt: skip
