"""Triton kernels of the matrix products of a decoding step, which are bound by reading the weights; see `decode`."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmcore.kernels.common.overlap import early, launch_options

VECTOR_ROWS = 8
"""Up to so many rows the products are sums in registers; above, tiles for the tensor cores."""


@triton.jit
def _vector_kernel(
    x_ptr,  # (B, N), of the weights' dtype
    w_ptr,  # (M, N), or (2M, N) when gated
    out_ptr,  # (B, M)
    copy_ptr,  # (B, M): the sum once more, in the weights' dtype (ADD)
    eps,
    M: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Matrix times few vectors: a program holds all of ROWS rows of the matrix in registers.

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
        if NORM:  # the same for all features, so it can come after the product
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
    x_ptr,
    w_ptr,
    out_ptr,
    copy_ptr,
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
    EARLY: tl.constexpr,
):
    """The same for many vectors, BATCH at a time, on the tensor cores."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    x_rows = x_ptr + b[:, None] * N
    w_rows = w_ptr + rows.to(tl.int64)[None, :] * N
    y = tl.zeros([BATCH, ROWS], tl.float32)
    z = tl.zeros([BATCH, ROWS], tl.float32)
    squares = tl.zeros([BATCH], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if NORM:  # in a loop of its own: x in shared memory, as the product wants it, is not to be read beside it
        for start in tl.range(0, N, CHUNK, num_stages=1):
            i = start + tl.arange(0, CHUNK)
            x = tl.load(x_rows + i[None, :], mask=(b < batch)[:, None] & (i < N)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
    for start in tl.range(0, N, CHUNK):
        i = start + tl.arange(0, CHUNK)
        x = tl.load(x_rows + i[None, :], mask=(b < batch)[:, None] & (i < N)[None, :], other=0.0)
        inside = (rows < M)[None, :] & (i < N)[:, None]
        w = tl.load(w_rows + i[:, None], mask=inside, other=0.0)
        y = tl.dot(x, w, y, input_precision="ieee")
        if GATED:
            gate = tl.load(w_rows + M * N + i[:, None], mask=inside, other=0.0)
            z = tl.dot(x, gate, z, input_precision="ieee")
    if NORM:
        scale = (1.0 / tl.sqrt(squares / N + eps))[:, None]
        y = y * scale
        z = z * scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * z
    at = b[:, None] * M + rows[None, :]
    mask = (b < batch)[:, None] & (rows < M)[None, :]
    if ADD:
        y += tl.load(out_ptr + at, mask=mask, other=0.0)
        tl.store(copy_ptr + at, y, mask=mask)
    tl.store(out_ptr + at, y, mask=mask)


WARP_BYTES = 10 * 1024
"""Of weights that a warp holds: 80 registers a thread, so that a multiprocessor has some 170 KiB on their way."""


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


def _tile(num_outputs: int, batch: int) -> tuple[int, int]:
    """(rows of the matrix, vectors) of a program: enough programs for every multiprocessor to have one."""
    rows = 32
    while rows > 8 and num_outputs // rows < 96:
        rows //= 2
    return rows, min(64, max(16, triton.next_power_of_2(batch)))


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    copy: Tensor | None = None,
    norm: bool = False,
    gated: bool = False,
    add: bool = False,
    eps: float = 1e-5,
    overlap: bool = False,
) -> None:
    """All matrix products of a step: with a norm before it, a gate or a residual sum (and its copy) after it."""
    batch, num_outputs = out.shape
    num_inputs = weight.shape[1]
    pointers = (x, weight, out, out if copy is None else copy, eps)
    options = {
        "M": num_outputs, "N": num_inputs, "NORM": norm, "GATED": gated, "ADD": add, "EARLY": early(out.device),
        **launch_options(out.device, overlap),
    }  # fmt: skip
    if batch <= VECTOR_ROWS:
        rows, chunk, warps = _vector_tile(num_outputs, num_inputs, weight.element_size(), 1 + gated)
        grid = (triton.cdiv(num_outputs, rows),)
        _vector_kernel[grid](*pointers, B=batch, ROWS=rows, CHUNK=chunk, num_warps=warps, **options)
        return
    rows, width = _tile(num_outputs, batch)
    grid = (triton.cdiv(num_outputs, rows), triton.cdiv(batch, width))
    chunk = (256 if width == 16 else 128) // weight.element_size() * (1 if gated else 2)
    _tile_kernel[grid](
        *pointers, batch, BATCH=width, ROWS=rows, CHUNK=chunk, num_warps=4, num_stages=4, **options
    )  # fmt: skip
