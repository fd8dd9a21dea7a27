"""Triton kernels of `lmcore.fast.kernels.rmsnorm`, whose functions these are: it says what they are given.

Letters: N rows, D d_model, P programs of the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_TILE, BACKWARD_TILE = 2048, 4096
"""Elements that a program holds at a time, unless a row is longer; in the backward pass many, to load them together."""

PROGRAMS_PER_PROCESSOR = 4
"""Programs of the backward pass per multiprocessor, for rows of at most half a tile; half as many for longer ones."""

SUM_ROWS, SUM_COLUMNS = 32, 32
"""Tile of a program that adds up partial sums."""


@triton.jit
def rmsnorm_forward_kernel(
    x_ptr, branch_ptr, weight_ptr, total_ptr, y_ptr, rstd_ptr, num_rows, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * ROWS and following, whole."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = rows[:, None].to(tl.int64) * D + columns[None, :]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < D)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(branch_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)  # the norm is that of the rounded sum: the backward pass has no other
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, residual_ptr, dx_ptr, partials_ptr, num_rows,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program i of P: every P-th block of ROWS rows, and the sum of its share of the weight's gradient."""
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        at = rows[:, None].to(tl.int64) * D + columns[None, :]
        inside = (rows[:, None] < num_rows) & (columns[None, :] < D)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        xhat = x * rstd[:, None]
        sums += tl.sum(dy * xhat, axis=0)
        weighted = dy * weight[None, :]
        mean = tl.sum(weighted * xhat, axis=1) / D
        dx = rstd[:, None] * (weighted - xhat * mean[:, None])
        if ADD:
            dx += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(partials_ptr + tl.program_id(0) * D + columns, sums, mask=columns < D)


@triton.jit
def sum_kernel(partials_ptr, sums_ptr, num_parts, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (i, j): COLUMNS columns of sum i of `num_parts` rows, always in the same order."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = partials_ptr + tl.program_id(0).to(tl.int64) * num_parts * D
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < num_parts) & (columns[None, :] < D)
        total += tl.load(first + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)
    tl.store(sums_ptr + tl.program_id(0) * D + columns, tl.sum(total, axis=0), mask=columns < D)


def rmsnorm_forward(x, weight, eps=1e-5, branch=None, y=None) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, d = x.shape
    tile, warps = _tile(d, FORWARD_TILE)
    total = x if branch is None else torch.empty_like(x)
    y = torch.empty_like(x) if y is None else y
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    rmsnorm_forward_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
        x, x if branch is None else branch, weight, total, y, rstd, num_rows, eps,
        **tile, D=d, ADD=branch is not None, num_warps=warps,
    )  # fmt: skip
    return total, y, rstd


def rmsnorm_backward(dy, x, weight, rstd, residual=None, dx=None, partials=None) -> tuple[Tensor, Tensor]:
    num_rows, d = x.shape
    tile, warps = _tile(d, BACKWARD_TILE)
    dx = torch.empty_like(x) if dx is None else dx
    partials = x.new_empty(num_partials(x), d, dtype=torch.float32) if partials is None else partials
    rmsnorm_backward_kernel[(num_partials(x),)](
        dy, x, weight, rstd, dy if residual is None else residual, dx, partials, num_rows,
        **tile, D=d, ADD=residual is not None, num_warps=warps,
    )  # fmt: skip
    return dx, partials


def num_partials(x: Tensor) -> int:
    num_rows, d = x.shape
    per_processor = PROGRAMS_PER_PROCESSOR if d <= BACKWARD_TILE // 2 else PROGRAMS_PER_PROCESSOR // 2
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    return min(triton.cdiv(num_rows, _tile(d, BACKWARD_TILE)[0]["ROWS"]), per_processor * processors)


def sum_partials(partials: Tensor, out: Tensor) -> Tensor:
    sums, num_parts, d = partials.shape
    sum_kernel[(sums, triton.cdiv(d, SUM_COLUMNS))](
        partials, out, num_parts, D=d, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=4
    )
    return out


def _tile(d: int, elements: int) -> tuple[dict[str, int], int]:
    """Rows and columns of a program's tile, and its warps."""
    block = triton.next_power_of_2(d)
    return {"ROWS": max(1, elements // block), "BLOCK": block}, max(4, min(16, block // 512))
