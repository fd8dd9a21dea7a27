"""The gate of SwiGLU between its matmuls, SiLU(a) * b, forward and backward (section 3.5.2; Shazeer 2020)."""

import torch
from torch import Tensor

from lmcore.fast.kernels.dispatch import by_triton
from lmcore.functional import at_least_float32, silu


@by_triton
def swiglu_forward(ab: Tensor, h: Tensor | None = None) -> Tensor:
    """SiLU(a) * b (N, F) of `ab` (N, 2F), whose row holds a = W1 x, then b = W3 x. Computed in at least float32."""
    a, b = at_least_float32(ab).chunk(2, dim=-1)
    result = (silu(a) * b).to(ab.dtype)
    return result if h is None else h.copy_(result)


@by_triton
def swiglu_backward_(dh: Tensor, ab: Tensor) -> Tensor:
    """Replaces `ab` (N, 2F) by its gradient, given `dh` (N, F), that of SiLU(a) * b; returns `ab`.

    With s = sigmoid(a): da = dh * b * s * (1 + a * (1 - s)) and db = dh * a * s.
    """
    a, b = at_least_float32(ab).chunk(2, dim=-1)
    wide, s = at_least_float32(dh), torch.sigmoid(a)
    return ab.copy_(torch.cat((wide * b * s * (1 + a * (1 - s)), wide * a * s), dim=-1))
