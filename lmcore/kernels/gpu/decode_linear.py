"""Triton kernels of the matrix products of a decoding step, which are bound by reading the weights; see `decode`."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmcore.kernels.gpu.overlap import early, launch_options

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
        "HEAD_SIZE": head_size, "EARLY": early(out.device), **launch_options(out.device, overlap),
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
