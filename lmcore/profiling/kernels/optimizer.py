"""AdamW with gradient clipping over a whole model by several implementations, and the bytes that an update moves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lmcore.fast.kernels.adamw import FusedAdamW
from lmcore.optimizer import AdamW, gradient_clipping
from lmcore.profiling.kernels.bytes_moved import BytesMoved, moved_by

MAX_NORM = 1.0

ONE_PASS = 4 + 16 + 12
"""Bytes for each parameter of an update in one pass, all in float32: the gradient for its norm; weight, gradient and
both moments in; weight and both moments out."""

ONE_PASS_MIXED = 2 + 14 + 14
"""The same with bfloat16 gradients, and with a bfloat16 copy of the weight written for the next forward pass."""

TORCH_FUSED = 4 + 8 + 28
"""Clipping of PyTorch's reads every gradient for the norm, then reads and writes it; the fused update is one pass."""

COUNTED = 1 << 20
"""Parameters of which operations are counted: so many that scalars do not show."""

Update = Callable[[], Any]


def plain(parameters: list[nn.Parameter], max_norm: float | None = None, **settings: Any) -> Update:
    """The update of `lmcore.optimizer`, operation by operation; with `max_norm` clipping goes before it."""
    step = AdamW(parameters, **settings).step
    return step if max_norm is None else lambda: (gradient_clipping(parameters, max_norm), step())


def torch_fused(parameters: list[nn.Parameter], max_norm: float | None = None, **settings: Any) -> Update:
    """PyTorch's fused update."""
    step = torch.optim.AdamW(parameters, fused=True, **settings).step
    return step if max_norm is None else lambda: (nn.utils.clip_grad_norm_(parameters, max_norm), step())


def ours(parameters: list[nn.Parameter], max_norm: float | None = None, **settings: Any) -> Update:
    """Our fused update."""
    return FusedAdamW(parameters, max_grad_norm=max_norm, **settings).step


def update_moved(update: Callable[..., Update] = plain, device: str = "meta") -> BytesMoved:
    """What one step with clipping moves for `COUNTED` parameters, operation by operation."""
    weight = nn.Parameter(torch.zeros(COUNTED, device=device))
    weight.grad = torch.zeros_like(weight)
    step = update([weight], MAX_NORM)
    step()  # the moments exist from the first step on
    return moved_by(step)
