"""Triton kernels of `lmcore.fast.kernels.swiglu`. Letters: N rows, F d_ff."""

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 4, 512
"""Rows and columns of the N × F results that a program computes."""


@triton.jit
def swiglu_forward_kernel(ab_ptr, h_ptr, num_rows, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (i, j): a tile of ROWS × COLUMNS of h."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < F)
    at = rows[:, None] * (2 * F) + columns[None, :]
    a = tl.load(ab_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(ab_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    h = a * tl.sigmoid(a) * b
    tl.store(h_ptr + rows[:, None] * F + columns[None, :], h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(dh_ptr, ab_ptr, num_rows, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (i, j): the gradients of a tile of ROWS × COLUMNS of both halves, where the halves were."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < F)
    at = rows[:, None] * (2 * F) + columns[None, :]
    a = tl.load(ab_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(ab_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + rows[:, None] * F + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    da = dh * b * s * (1 + a * (1 - s))
    tl.store(ab_ptr + at, da.to(ab_ptr.dtype.element_ty), mask=inside)
    tl.store(ab_ptr + at + F, (dh * a * s).to(ab_ptr.dtype.element_ty), mask=inside)


def swiglu_forward(ab: Tensor, h: Tensor | None = None) -> Tensor:
    num_rows, f = ab.shape[0], ab.shape[1] // 2
    h = ab.new_empty(num_rows, f) if h is None else h
    swiglu_forward_kernel[_grid(num_rows, f)](ab, h, num_rows, F=f, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return h


def swiglu_backward_(dh: Tensor, ab: Tensor) -> Tensor:
    num_rows, f = dh.shape
    swiglu_backward_kernel[_grid(num_rows, f)](dh, ab, num_rows, F=f, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return ab


def _grid(num_rows: int, f: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, ROWS), triton.cdiv(f, COLUMNS)
