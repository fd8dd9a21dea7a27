"""The gate of SwiGLU between its matmuls, SiLU(a) * b, forward and backward (section 3.5.2; Shazeer 2020)."""

import torch
from torch import Tensor

from lmcore.fast.kernels.dispatch import by_triton, is_hopper, on_device_of
from lmcore.functional import at_least_float32, silu

NARROW, MANY_ROWS = 512, 4096
"""Up to this d_model, and from so many rows on, `linear_swiglu_backward_` is faster as one kernel, by measurement on
the H200: the deeper the matmul, the more it loses there against cuBLAS."""


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


def linear_swiglu_backward_(dy: Tensor, w2: Tensor, ab: Tensor) -> Tensor:
    """`swiglu_backward_` of dh = dy W2, given `dy` (N, D) and `w2` (D, F).

    One kernel where that is faster, a matmul and `swiglu_backward_` elsewhere.
    """
    if goes_in_one(dy, w2):
        from lmcore.fast.kernels.swiglu import hopper

        with on_device_of(ab):
            return hopper.linear_swiglu_backward_(dy, w2, ab)
    return swiglu_backward_(torch.mm(dy, w2), ab)


def goes_in_one(dy: Tensor, w2: Tensor) -> bool:
    """Whether one kernel serves these: on Hopper, whose TMA copies rows of whole 16 bytes."""
    (rows, d), f = dy.shape, w2.shape[1]
    worth_it = rows >= MANY_ROWS and d <= NARROW and d % 8 == 0 and f % 8 == 0
    return worth_it and dy.dtype == torch.bfloat16 and is_hopper(dy.device)
