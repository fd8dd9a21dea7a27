"""The gate of SwiGLU between its matrix products, SiLU(a) * b, forward and backward (section 3.5.2; Shazeer 2020)."""

import torch
from torch import Tensor

from lmcore.functional import at_least_float32, silu
from lmcore.kernels.support import on_device_of, runs_triton


def swiglu_forward(ab: Tensor, h: Tensor | None = None) -> Tensor:
    """SiLU(a) * b (N, F) of `ab` (N, 2F), whose row holds a = W1 x, then b = W3 x. Computed in at least float32."""
    if runs_triton(ab.device):
        from lmcore.kernels.gpu import swiglu

        with on_device_of(ab):
            return swiglu.swiglu_forward(ab, h)
    a, b = at_least_float32(ab).chunk(2, dim=-1)
    result = (silu(a) * b).to(ab.dtype)
    return result if h is None else h.copy_(result)


def swiglu_backward_(dh: Tensor, ab: Tensor) -> Tensor:
    """Replaces `ab` (N, 2F) by its gradient, given `dh` (N, F), that of SiLU(a) * b; returns `ab`.

    With s = sigmoid(a): da = dh * b * s * (1 + a * (1 - s)) and db = dh * a * s.
    """
    if runs_triton(ab.device):
        from lmcore.kernels.gpu import swiglu

        with on_device_of(ab):
            return swiglu.swiglu_backward_(dh, ab)
    a, b = at_least_float32(ab).chunk(2, dim=-1)
    wide, s = at_least_float32(dh), torch.sigmoid(a)
    gradients = torch.cat((wide * b * s * (1 + a * (1 - s)), wide * a * s), dim=-1)
    return ab.copy_(gradients)
