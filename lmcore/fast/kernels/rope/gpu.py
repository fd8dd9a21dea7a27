"""Triton kernel of `lmcore.fast.kernels.rope`. Letters: N rows, D d_model, K head size."""

import triton
import triton.language as tl
from torch import Tensor

ROWS, PAIRS = 4, 256
"""Rows and feature pairs that a program rotates."""


@triton.jit
def rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, num_rows, seq_length,
    D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Program (i, j): pairs j * PAIRS and following of the 2D features of q and k, in ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    features = tl.program_id(1) * 2 * PAIRS + tl.arange(0, 2 * PAIRS)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    at = rows[:, None].to(tl.int64) * (3 * D) + features[None, :]
    inside = (rows[:, None] < num_rows) & (features[None, :] < 2 * D)
    x = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
    angle = (rows % seq_length)[:, None] * HALF + (pairs % HALF)[None, :]
    known = (rows[:, None] < num_rows) & (pairs[None, :] < D)
    cos = tl.load(cos_ptr + angle, mask=known, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=known, other=0.0)
    if INVERSE:
        sin = -sin
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    y = tl.reshape(rotated, [ROWS, 2 * PAIRS])
    tl.store(qkv_ptr + at, y.to(qkv_ptr.dtype.element_ty), mask=inside)


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, seq_length: int, inverse: bool = False) -> Tensor:
    num_rows, width = qkv.shape
    d = width // 3
    rope_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(d, PAIRS))](
        qkv, cos, sin, num_rows, seq_length,
        D=d, HALF=cos.shape[1], ROWS=ROWS, PAIRS=PAIRS, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
    return qkv
