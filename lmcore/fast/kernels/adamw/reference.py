"""Reference implementation of `lmcore.fast.kernels.adamw` in plain PyTorch, and what it and the kernels are given."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmcore.optimizer import gradient_norm


class Slot(NamedTuple):
    """The tensors of one parameter, all of its size and contiguous."""

    p: Tensor  # float32
    gradient: Tensor  # bfloat16 or float32
    m: Tensor  # float32
    v: Tensor  # float32
    copy: Tensor | None  # bfloat16 or float32: the parameter that the model computes with


class Settings(NamedTuple):
    """Scalars of one parameter's update (`lmcore.optimizer.adamw_update`), as a row of the kernels' table."""

    beta1: float
    gain1: float  # 1 - beta1
    beta2: float
    gain2: float  # 1 - beta2
    lr_t: float
    eps: float
    keep: float  # 1 - lr * weight_decay
    max_norm: float


NOTHING = Settings(beta1=1, gain1=0, beta2=1, gain2=0, lr_t=0, eps=1, keep=1, max_norm=math.inf)
"""Settings of an update that changes nothing."""


def measure(gradients: list[Tensor], norm: Tensor) -> None:
    """Writes the gradients' joint l2 norm into `norm`."""
    norm.copy_(gradient_norm([g.float() for g in gradients]) if gradients else torch.zeros(()))


def update(slots: list[Slot], rows: list[Settings], norm: Tensor | None) -> None:
    """`lmcore.optimizer.adamw_update` for all `slots`, each with its row of settings.

    With `norm`, the gradients are clipped by it.
    """
    scale = None
    for (p, gradient, m, v, copy), row in zip(slots, rows, strict=True):
        if row is NOTHING:
            continue
        g = gradient.float()
        if norm is not None:
            scale = torch.clamp(row.max_norm / (norm + 1e-6), max=1.0) if scale is None else scale
            g = g * scale
        m.mul_(row.beta1).add_(g, alpha=row.gain1)
        v.mul_(row.beta2).addcmul_(g, g, value=row.gain2)
        p.addcdiv_(m, v.sqrt().add_(row.eps), value=-row.lr_t)
        p.mul_(row.keep)
        if copy is not None:
            copy.copy_(p)
