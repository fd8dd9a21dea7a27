"""Rotary position embedding of queries and keys where they lie, side by side with the values (section 3.5.3)."""

import torch
from torch import Tensor

from lmcore.fast.kernels.dispatch import by_triton
from lmcore.functional import at_least_float32


@by_triton
def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, seq_length: int, inverse: bool = False) -> Tensor:
    """Rotates the queries and keys in `qkv` (N, 3D) in place, by the angle of their position; returns `qkv`.

    A row holds q, k and v of all heads one after the other; row n has position n modulo `seq_length`. `cos` and `sin`
    are (at least seq_length, K / 2) in float32 as in `lmcore.model.RotaryPositionalEmbedding`: feature pairs (2i,
    2i + 1) of a head turn by angle i. `inverse` turns back, which is the backward pass: a rotation's inverse is its
    transpose. (The fused step turns gradients back within attention's backward pass.) Computed in at least float32.
    """
    rows, width = qkv.shape
    heads = qkv[:, : 2 * width // 3].view(rows // seq_length, seq_length, -1, 2 * cos.shape[1])
    apply_rope_(heads.transpose(1, 2), cos, sin, inverse)
    return qkv


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the feature pairs of `x` (..., T, K) in place; `cos`, `sin` and `inverse` as in `rope_`."""
    c, s = cos[: x.shape[-2]], sin[: x.shape[-2]]
    return x.copy_(apply_rope(x, c, -s if inverse else s))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` (..., K) with its feature pairs rotated, in at least float32; `cos` and `sin` have K / 2 features."""
    even, odd = at_least_float32(x[..., 0::2]), at_least_float32(x[..., 1::2])
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
