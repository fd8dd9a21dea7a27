"""Reference implementation of `lmcore.fast.kernels.rope` in plain PyTorch."""

import torch
from torch import Tensor

from lmcore.functional import at_least_float32


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, seq_length: int, inverse: bool = False) -> Tensor:
    """See `lmcore.fast.kernels.rope.rope_`."""
    rows, width = qkv.shape
    heads = qkv[:, : 2 * width // 3].view(rows // seq_length, seq_length, -1, 2 * cos.shape[1])
    apply_rope_(heads.transpose(1, 2), cos, sin, inverse)
    return qkv


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the feature pairs of `x` (..., T, K) in place; `cos`, `sin` and `inverse` as in `kernels.rope`."""
    c, s = cos[: x.shape[-2]], sin[: x.shape[-2]]
    return x.copy_(apply_rope(x, c, -s if inverse else s))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` (..., K) with its feature pairs rotated, in at least float32; `cos` and `sin` have K / 2 features."""
    even, odd = at_least_float32(x[..., 0::2]), at_least_float32(x[..., 1::2])
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
