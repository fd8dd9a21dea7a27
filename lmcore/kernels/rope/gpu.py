"""Triton kernel of `lmcore.kernels.rope`, and how attention's kernels turn a tile.

Letters: N rows, D d_model, K head size.
"""

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


# signatures of kernels are lists of operands: they stay as they are written
# fmt: off


@triton.jit
def load_angles(table, rows, T, SIZE: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of the cosines or sines (T, SIZE / 2), of which D / 2 is the next power of two; WHOLE: none is missing."""
    pair = tl.arange(0, D // 2)
    at = table + rows[:, None] * (SIZE // 2) + pair[None, :]
    if WHOLE and SIZE == D:
        return tl.load(at)
    return tl.load(at, mask=(rows[:, None] < T) & (pair[None, :] < SIZE // 2), other=0.0)


@triton.jit
def turned(x, c, s, M: tl.constexpr, D: tl.constexpr):
    """Feature pairs of x (M, D) turned by angles with cosines c and sines s (M, D / 2), in x's type."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [M, D // 2, 2]))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [M, D]).to(x.dtype)


@triton.jit
def turned_back(x, cos, sin, rows, T, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """The gradient of rows of a head from that of the same rows turned: a rotation's inverse is its transpose."""
    c = load_angles(cos, rows, T, SIZE, D, WHOLE)
    s = load_angles(sin, rows, T, SIZE, D, WHOLE)
    return turned(x, c, -s, M, D)


# fmt: on


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, seq_length: int, inverse: bool = False) -> Tensor:
    """See `lmcore.kernels.rope.rope_`."""
    num_rows, width = qkv.shape
    d = width // 3
    rope_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(d, PAIRS))](
        qkv, cos, sin, num_rows, seq_length,
        D=d, HALF=cos.shape[1], ROWS=ROWS, PAIRS=PAIRS, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
    return qkv
