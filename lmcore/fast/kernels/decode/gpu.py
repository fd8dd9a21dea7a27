"""Triton kernels of one decoding step; `lmcore.fast.kernels.decode` says what each function here computes.

A step of a small model is a chain of kernels of a few microseconds, so each one is arranged to begin before the one
in front of it has ended (programmatic dependent launch, CUDA programming guide section 4.5): it first loads its
weights and the cache of earlier positions, which nothing in this step changes, and only then waits for its input.
Every weight is read once, whatever the number of rows.

Shape letters: B rows (sequences), D d_model, H heads, K head size, S slots of the cache, F d_ff, V vocabulary,
M outputs of a matrix, N its inputs.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmcore.config import GenerateConfig
from lmcore.fast.kernels.decode import EPS, Sequences

VECTOR_ROWS = 8
"""Up to so many rows the matmuls are sums in registers; above, tiles for the tensor cores."""

MULTIPROCESSORS = 132
"""Of an H200: what the numbers of programs are chosen for."""

WARP_BYTES = 10 * 1024
"""Of weights that a warp holds: 80 registers a thread, so that a multiprocessor has some 170 KiB on their way."""

WARP_ELEMENTS = 2048
"""Of the keys, and of the values, that a warp of attention holds at once: 64 registers a thread for each."""


def launch_options(device: torch.device, overlap: bool) -> dict[str, bool]:
    """EARLY: whether kernels can begin early, from Hopper on, and wait by `gdc_wait`; with `overlap` this one does."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": early} | ({"launch_pdl": True} if overlap and early else {})


# --- matmuls, which are bound by reading the weights


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, out_ptr, copy_ptr, eps, M: tl.constexpr, B: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Matrix times few vectors: a program holds all of ROWS rows of the matrix in registers.

    x is (B, N) in the weights' type, w (M, N), or (2M, N) when GATED, out (B, M); with ADD, copy is the sum once more.

    x is loaded as a row of the weights' tile: the same layout, so nothing has to go through shared memory. A thread
    adds up its own features first (those of one load), which leaves one sum for each of its loads' places and rows.
    """
    CHUNKS: tl.constexpr = (N + CHUNK - 1) // CHUNK
    OWN: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = w_ptr + rows.to(tl.int64)[:, None] * N
    w, gate = (), ()
    for c in tl.static_range(CHUNKS):
        i = (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        inside = (rows < M)[:, None] & (i < N)
        w += (tl.load(base + i, mask=inside, other=0.0),)
        if GATED:
            gate += (tl.load(base + M * N + i, mask=inside, other=0.0),)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    y, z, squares = (), (), ()
    for c in tl.static_range(CHUNKS):
        i = (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        wide = w[c].to(tl.float32)
        if GATED:
            wide_gate = gate[c].to(tl.float32)
        y_before, z_before, squares_before = y, z, squares
        y, z, squares = (), (), ()
        for b in tl.static_range(B):
            x = tl.load(x_ptr + b * N + i, mask=i < N, other=0.0).to(tl.float32)
            part = tl.sum(tl.reshape(wide * x, [ROWS, CHUNK // OWN, OWN]), 2)
            y += (part if c == 0 else y_before[b] + part,)
            if GATED:
                part = tl.sum(tl.reshape(wide_gate * x, [ROWS, CHUNK // OWN, OWN]), 2)
                z += (part if c == 0 else z_before[b] + part,)
            if NORM:
                part = tl.sum(tl.reshape(x * x, [1, CHUNK // OWN, OWN]), 2)
                squares += (part if c == 0 else squares_before[b] + part,)
    for b in tl.static_range(B):
        out = tl.sum(y[b], 1)
        scale = 1.0
        if NORM:  # the same for all features, so it can come after the matmul
            scale = 1.0 / tl.sqrt(tl.sum(squares[b], 1) / N + eps)
            out = out * scale
        if GATED:
            out = out / (1.0 + tl.exp(-out)) * (tl.sum(z[b], 1) * scale)
        if ADD:
            out += tl.load(out_ptr + b * M + rows, mask=rows < M)
            tl.store(copy_ptr + b * M + rows, out, mask=rows < M)
        tl.store(out_ptr + b * M + rows, out, mask=rows < M)


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, out_ptr, copy_ptr, eps, sums_ptr, counts_ptr, batch, M: tl.constexpr, BATCH: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same for many vectors, BATCH at a time, on the tensor cores.

    With SPLITS, programs share the inputs of a tile: each leaves its sums (SPLITS, batch, M), and the last of them to
    arrive, as `counts` say, adds all up, always in the same order.
    """
    block, split = tl.program_id(0), tl.program_id(2)
    rows = block * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    x_rows = x_ptr + b[:, None] * N
    w_rows = w_ptr + rows.to(tl.int64)[None, :] * N
    y = tl.zeros([BATCH, ROWS], tl.float32)
    z = tl.zeros([BATCH, ROWS], tl.float32)
    squares = tl.zeros([BATCH], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if NORM:  # in a loop of its own: x in shared memory, as the matmul wants it, is not to be read beside it
        for start in tl.range(0, N, CHUNK, num_stages=1):
            i = start + tl.arange(0, CHUNK)
            x = tl.load(x_rows + i[None, :], mask=(b < batch)[:, None] & (i < N)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
    LENGTH: tl.constexpr = (N + SPLITS * CHUNK - 1) // (SPLITS * CHUNK) * CHUNK
    for start in tl.range(split * LENGTH, min(N, (split + 1) * LENGTH), CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = tl.load(x_rows + i[None, :], mask=(b < batch)[:, None] & (i < N)[None, :], other=0.0)
        inside = (rows < M)[None, :] & (i < N)[:, None]
        w = tl.load(w_rows + i[:, None], mask=inside, other=0.0)
        y = tl.dot(x, w, y, input_precision="ieee")
        if GATED:
            gate = tl.load(w_rows + M * N + i[:, None], mask=inside, other=0.0)
            z = tl.dot(x, gate, z, input_precision="ieee")
    at = b[:, None] * M + rows[None, :]
    mask = (b < batch)[:, None] & (rows < M)[None, :]
    last = True
    if SPLITS > 1:
        tl.store(sums_ptr + split * batch * M + at, y, mask=mask)
        tl.debug_barrier()  # all of the program's sums come before its count
        counter = counts_ptr + tl.program_id(1) * tl.num_programs(0) + block
        last = tl.atomic_add(counter, 1) == SPLITS - 1
        if last:
            tl.store(counter, 0)
            y = tl.zeros([BATCH, ROWS], tl.float32)
            for s in tl.static_range(SPLITS):
                y += tl.load(sums_ptr + s * batch * M + at, mask=mask, other=0.0)
    if last:
        if NORM:
            scale = (1.0 / tl.sqrt(squares / N + eps))[:, None]
            y = y * scale
            z = z * scale
        if GATED:
            y = y / (1.0 + tl.exp(-y)) * z
        if ADD:
            y += tl.load(out_ptr + at, mask=mask, other=0.0)
            tl.store(copy_ptr + at, y, mask=mask)
        tl.store(out_ptr + at, y, mask=mask)


def _vector_tile(num_outputs: int, num_inputs: int, itemsize: int, matrices: int) -> tuple[int, int, int]:
    """(rows of a program, inputs at a time, warps): rows in the registers of one warp, or of four for long rows.

    A thread takes 16 bytes of a row at a time. All warps of a program share a row, so that a row of the weights' tile
    and one of x have the same layout; with a single warp nothing passes through shared memory at all.
    """
    warps = 1 if num_inputs < 3072 else 4
    row_bytes, rows = num_inputs * itemsize * matrices, 16
    while rows > 1 and (rows * row_bytes > warps * WARP_BYTES or num_outputs // rows < 132):
        rows //= 2
    return rows, warps * 512 // itemsize, warps


def _tile(num_outputs: int, most_splits: int) -> tuple[int, int]:
    """(rows of the matrix, programs that share them), so that most multiprocessors have a program."""
    rows, splits = 32, 1
    if most_splits == 1:
        rows = next((n for n in (64, 32) if num_outputs // n >= MULTIPROCESSORS * n // 64), 16)
    while 2 * splits <= min(most_splits, MULTIPROCESSORS * rows // num_outputs):
        splits *= 2
    return rows, splits


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if cuda else 48 * 1024


def norm_linear(x: Tensor, weight: Tensor, out: Tensor, overlap: bool = False) -> None:
    _linear(x, weight, out, out, overlap, norm=True)


def norm_swiglu(x: Tensor, weight: Tensor, out: Tensor, overlap: bool = False) -> None:
    _linear(x, weight, out, out, overlap, norm=True, gated=True)


def linear_add(
    h: Tensor, weight: Tensor, x: Tensor, copy: Tensor, sums: Tensor | None = None, counts: Tensor | None = None,
    overlap: bool = False,
) -> None:  # fmt: skip
    _linear(h, weight, x, copy, overlap, sums, counts, add=True)


def _linear(
    x: Tensor, weight: Tensor, out: Tensor, copy: Tensor, overlap: bool, sums: Tensor | None = None,
    counts: Tensor | None = None, norm: bool = False, gated: bool = False, add: bool = False,
) -> None:  # fmt: skip
    """All matmuls of a step: with a norm before it, a gate or a residual sum (and its copy) after it."""
    batch, num_outputs = out.shape
    num_inputs, itemsize = weight.shape[1], weight.element_size()
    pointers = (x, weight, out, copy, EPS)
    options = {
        "M": num_outputs, "N": num_inputs, "NORM": norm, "GATED": gated, "ADD": add,
        **launch_options(out.device, overlap),
    }  # fmt: skip
    if batch <= VECTOR_ROWS:
        rows, chunk, warps = _vector_tile(num_outputs, num_inputs, itemsize, 1 + gated)
        grid = (triton.cdiv(num_outputs, rows),)
        _vector_kernel[grid](*pointers, B=batch, ROWS=rows, CHUNK=chunk, num_warps=warps, **options)
        return
    rows, splits = _tile(num_outputs, 1 if sums is None else len(sums))
    width = min(64, max(16, triton.next_power_of_2(batch)))
    chunk = (128 if width == 64 else 64) * 2 // itemsize
    stages = _shared_bytes(out.device) // (chunk * (width + rows * (1 + gated)) * itemsize)
    grid = (triton.cdiv(num_outputs, rows), triton.cdiv(batch, width), splits)
    _tile_kernel[grid](
        *pointers, sums, counts, batch, BATCH=width, ROWS=rows, CHUNK=chunk, SPLITS=splits, num_warps=4,
        num_stages=max(1, min(3 if rows == 64 else 5, stages)), **options,
    )  # fmt: skip


# --- attention of one new position


@triton.jit
def _attend_kernel(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, positions_ptr, heads_ptr, lse_ptr, batch, heads, slots, scale,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query of one head over every SPLITS-th block of its keys; of the new key too where it falls into one.

    For the tensors see `attend`; with SPLITS, heads is (SPLITS, B, D) in float32, and lse (SPLITS, B, H) to the base 2.
    """
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
    parts_ptr, lse_ptr, heads_ptr, count,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
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
    qkv, cos, sin, keys, values, positions, heads, parts: Tensor | None = None, lse: Tensor | None = None,
    overlap: bool = False,
) -> None:  # fmt: skip
    batch, num_heads, slots, head_size = keys.shape
    splits = 1 if parts is None else parts.shape[0]
    width = max(16, triton.next_power_of_2(head_size))
    options = {"HEAD_SIZE": head_size, "WIDTH": width, "SPLITS": splits, **launch_options(qkv.device, overlap)}
    warps = 8  # fewer where there are more programs, so that each multiprocessor has as many warps
    while warps > 1 and warps * num_heads * splits * batch > 8 * MULTIPROCESSORS:
        warps //= 2
    block = min(warps * WARP_ELEMENTS // width, max(16, triton.next_power_of_2(slots)))
    _attend_kernel[(num_heads, splits, batch)](
        qkv, cos, sin, keys, values, positions, heads if parts is None else parts, heads if lse is None else lse,
        batch, num_heads, slots, head_size**-0.5, BLOCK=block, num_warps=warps, **options,
    )  # fmt: skip
    if parts is not None:
        count = batch * num_heads
        _combine_kernel[(count,)](parts, lse, heads, count, num_warps=1, **options)


# --- the next token: taken from the logits, and made the input of the next step


@triton.jit
def _begin_next(token, row, batch, state, sizes, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Notes the token and makes it the input of the next step; see `_operands`."""
    tokens_ptr, steps_ptr, positions_ptr, embedding_ptr, x_ptr, copy_ptr = state
    capacity, slots = sizes
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
    logits_ptr, state, batch, vocab, num_ids, sizes, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
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
    _begin_next(token, row, batch, state, sizes, D, BLOCK_D)


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
    logits_ptr, uniforms_ptr, state, batch, vocab, num_ids, sizes, temperature, top_p, top_k, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, EARLY: tl.constexpr,
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
    u = tl.load(uniforms_ptr + (tl.load(state[1] + row) % sizes[0]) * batch + row)
    here = tl.maximum(tl.max(_key_where_reached(keys, mass, u * total, True), 0), last)
    equal = keys == here
    p = tl.max(tl.where(equal, mass, 0.0), 0)
    before = tl.sum(tl.where(keys > here, mass, 0.0), 0)
    limit = tl.where(here == last, kept, tl.sum(tl.where(equal, 1, 0), 0))
    index = tl.minimum(tl.maximum(tl.floor((u * total - before) / p).to(tl.int32), 0), limit - 1)
    rank = tl.cumsum(tl.where(equal, 1, 0), 0)
    token = tl.sum(tl.where(equal & (rank == index + 1), i, 0), 0)
    token = tl.where(wrong > 0, -1, token)
    _begin_next(token, row, batch, state, sizes, D, BLOCK_D)


def _operands(sequences: Sequences) -> tuple[tuple, tuple[int, int], dict[str, int]]:
    """The tensors of `sequences`; capacity of the ring of tokens, and slots; d_model and the power of two above."""
    d_model = sequences.x.shape[1]
    widths = {"D": d_model, "BLOCK_D": triton.next_power_of_2(d_model)}
    return tuple(sequences[:6]), (len(sequences.tokens), sequences.num_slots), widths


def greedy(logits: Tensor, num_ids: int, sequences: Sequences, overlap: bool = False) -> None:
    (batch, vocab), device = logits.shape, logits.device
    state, sizes, widths = _operands(sequences)
    block = min(8192, triton.next_power_of_2(num_ids))
    _greedy_kernel[(batch,)](
        logits, state, batch, vocab, num_ids, sizes, BLOCK=block, num_warps=16 if block > 2048 else 4,
        **widths, **launch_options(device, overlap),
    )  # fmt: skip


def sampled(
    logits: Tensor, num_ids: int, config: GenerateConfig, uniforms: Tensor, sequences: Sequences, overlap: bool = False
) -> None:
    (batch, vocab), device = logits.shape, logits.device
    state, sizes, widths = _operands(sequences)
    block = triton.next_power_of_2(num_ids)
    cut = config.top_k is not None and config.top_k < num_ids
    _sampled_kernel[(batch,)](
        logits, uniforms, state, batch, vocab, num_ids, sizes,
        max(config.temperature, torch.finfo(torch.float32).tiny), config.top_p, config.top_k if cut else 0,
        BLOCK=block, TOP_K=cut, TOP_P=config.top_p < 1, num_warps=32 if block > 8192 else 8,
        **widths, **launch_options(device, overlap),
    )  # fmt: skip
