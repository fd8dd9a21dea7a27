"""The gate of SwiGLU between its matmuls, SiLU(a) * b, forward and backward (section 3.5.2; Shazeer 2020)."""

from types import ModuleType

import torch
from torch import Tensor

from lmcore.fast.kernels.common.support import is_hopper, on_device_of, runs_triton
from lmcore.fast.kernels.swiglu import reference

NARROW, MANY_ROWS = 512, 4096
"""Up to this d_model, and from so many rows on, `linear_swiglu_backward_` is faster as one kernel, by measurement on
the H200: the deeper the matmul, the more it loses there against cuBLAS."""


def swiglu_forward(ab: Tensor, h: Tensor | None = None) -> Tensor:
    """SiLU(a) * b (N, F) of `ab` (N, 2F), whose row holds a = W1 x, then b = W3 x. Computed in at least float32."""
    with on_device_of(ab):
        return kernels(ab).swiglu_forward(ab, h)


def swiglu_backward_(dh: Tensor, ab: Tensor) -> Tensor:
    """Replaces `ab` (N, 2F) by its gradient, given `dh` (N, F), that of SiLU(a) * b; returns `ab`.

    With s = sigmoid(a): da = dh * b * s * (1 + a * (1 - s)) and db = dh * a * s.
    """
    with on_device_of(ab):
        return kernels(ab).swiglu_backward_(dh, ab)


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


def kernels(x: Tensor) -> ModuleType:
    """The module whose functions serve tensors like this one."""
    if not runs_triton(x.device):
        return reference
    from lmcore.fast.kernels.swiglu import gpu

    return gpu
