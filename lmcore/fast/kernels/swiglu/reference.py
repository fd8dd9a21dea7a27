"""Reference implementation of `lmcore.fast.kernels.swiglu` in plain PyTorch."""

import torch
from torch import Tensor

from lmcore.functional import at_least_float32, silu


def swiglu_forward(ab: Tensor, h: Tensor | None = None) -> Tensor:
    """See `lmcore.fast.kernels.swiglu.swiglu_forward`."""
    a, b = at_least_float32(ab).chunk(2, dim=-1)
    result = (silu(a) * b).to(ab.dtype)
    return result if h is None else h.copy_(result)


def swiglu_backward_(dh: Tensor, ab: Tensor) -> Tensor:
    """See `lmcore.fast.kernels.swiglu.swiglu_backward_`."""
    a, b = at_least_float32(ab).chunk(2, dim=-1)
    wide, s = at_least_float32(dh), torch.sigmoid(a)
    gradients = torch.cat((wide * b * s * (1 + a * (1 - s)), wide * a * s), dim=-1)
    return ab.copy_(gradients)
