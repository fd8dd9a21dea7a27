"""Triton functions that the kernels of several operations call: how attention's kernels turn a tile by RoPE."""

import triton
import triton.language as tl

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
def rotated(x, c, s, M: tl.constexpr, D: tl.constexpr):
    """Feature pairs of x (M, D) rotated by angles with cosines c and sines s (M, D / 2), in x's type."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [M, D // 2, 2]))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [M, D]).to(x.dtype)


@triton.jit
def rotated_back(x, cos, sin, rows, T, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """The gradient of rows of a head from that of the same rows rotated: a rotation's inverse is its transpose."""
    c = load_angles(cos, rows, T, SIZE, D, WHOLE)
    s = load_angles(sin, rows, T, SIZE, D, WHOLE)
    return rotated(x, c, -s, M, D)
