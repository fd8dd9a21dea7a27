"""SwiGLU's backward pass inside the matmul before it. Letters: N rows, D d_model, F d_ff.

Tiles of dh stay in registers until they are multiplied into the gradients of both halves, so that neither dh nor a
second kernel goes through memory. Half a tile is multiplied at a time, which leaves registers for two programs on each
multiprocessor: one computes while the other waits for memory.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmcore.fast.kernels.swiglu.gpu import gate_gradients

ROWS, COLUMNS, DEPTH = 128, 128, 64
"""Rows and columns of a tile of dh, and features of D that a turn of the matmul takes."""

GROUP = 4
"""Tiles of rows whose programs run beside each other for all columns: what they share comes from the cache."""


@triton.jit
def replace_by_gradients(dh, a_desc, b_desc, row, column):
    """The gradients of a tile of both halves, where the halves were; rounded to dh's own type on the way."""
    a, b = a_desc.load([row, column]), b_desc.load([row, column])
    da, db = gate_gradients(dh.to(a.dtype).to(tl.float32), a.to(tl.float32), b.to(tl.float32))
    a_desc.store([row, column], da.to(a_desc.dtype))
    b_desc.store([row, column], db.to(b_desc.dtype))


@triton.jit
def linear_swiglu_backward_kernel(
    dy_desc, w2_desc, a_desc, b_desc, N, F, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dh = dy W2 and its gradients; TMA leaves out what lies outside of the matrices."""
    row_tiles, column_tiles = tl.cdiv(N, ROWS), tl.cdiv(F, COLUMNS)
    group = tl.program_id(0) // (GROUP * column_tiles)
    within = tl.program_id(0) % (GROUP * column_tiles)
    in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    row = (group * GROUP + within % in_group) * ROWS
    column = within // in_group * COLUMNS
    dh = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, tl.cdiv(D, DEPTH)):
        dy, w2 = dy_desc.load([row, k * DEPTH]), w2_desc.load([k * DEPTH, column])
        dh = tl.dot(dy, w2, dh, input_precision=PRECISION)
    left, right = tl.split(tl.permute(tl.reshape(dh, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))
    replace_by_gradients(left, a_desc, b_desc, row, column)
    replace_by_gradients(right, a_desc, b_desc, row, column + COLUMNS // 2)


def linear_swiglu_backward_(dy: Tensor, w2: Tensor, ab: Tensor) -> Tensor:
    """See `lmcore.fast.kernels.swiglu.linear_swiglu_backward_`."""
    (n, d), f = dy.shape, w2.shape[1]
    halves = [_tiles(half, ROWS, COLUMNS // 2) for half in (ab[:, :f], ab[:, f:])]
    linear_swiglu_backward_kernel[(triton.cdiv(n, ROWS) * triton.cdiv(f, COLUMNS),)](
        _tiles(dy, ROWS, DEPTH), _tiles(w2, DEPTH, COLUMNS), *halves, n, f, d,
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, GROUP=GROUP, PRECISION="ieee", num_warps=8, num_stages=3, maxnreg=128,
    )  # fmt: skip
    return ab


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
