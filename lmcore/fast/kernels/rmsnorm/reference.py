"""Reference implementation of `lmcore.fast.kernels.rmsnorm` in plain PyTorch."""

import torch
from torch import Tensor

from lmcore.functional import at_least_float32


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float = 1e-5, branch: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `lmcore.fast.kernels.rmsnorm.rmsnorm_forward`."""
    total = x if branch is None else (at_least_float32(x) + branch).to(x.dtype)
    wide = at_least_float32(total)
    rstd = (wide.square().mean(dim=-1) + eps).rsqrt()
    result = (wide * rstd[:, None] * weight).to(x.dtype)
    return total, result if y is None else y.copy_(result), rstd


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual: Tensor | None = None,
    dx: Tensor | None = None,
    partials: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `lmcore.fast.kernels.rmsnorm.rmsnorm_backward`."""
    wide_dy, xhat = at_least_float32(dy), at_least_float32(x) * rstd[:, None]
    weighted = wide_dy * weight
    result = rstd[:, None] * (weighted - xhat * (weighted * xhat).mean(dim=-1, keepdim=True))
    if residual is not None:
        result = result + residual
    sums = (wide_dy * xhat).sum(dim=0, keepdim=True)
    dx = result.to(x.dtype) if dx is None else dx.copy_(result)
    return dx, sums if partials is None else partials.copy_(sums)


def num_partials(x: Tensor) -> int:
    """See `lmcore.fast.kernels.rmsnorm.num_partials`: one sum over all rows."""
    return 1


def sum_partials(partials: Tensor, out: Tensor) -> Tensor:
    """See `lmcore.fast.kernels.rmsnorm.sum_partials`."""
    return torch.sum(partials, dim=1, out=out)


def rmsnorm_plain(x: Tensor, weight: Tensor, eps: float = 1e-5, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same for autograd, as `lmcore.model.RMSNorm` and the sum before it: (sum, y). For tests and timing."""
    total = x if branch is None else x + branch
    wide = at_least_float32(total)
    rms = torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return total, (wide / rms * weight).to(x.dtype)
