"""RMSNorm with the residual sum before it, forward and backward (section 3.5.1; Zhang and Sennrich 2019).

In a pre-norm block the sum of the residual stream and a sublayer's output is only ever normalized and passed on, and
the gradient of the norm only ever added to the stream's: each pair is one pass over memory.
"""

import torch
from torch import Tensor

from lmcore.functional import at_least_float32
from lmcore.kernels.common.support import on_device_of, runs_triton


def rmsnorm_forward(
    x: Tensor, gain: Tensor, eps: float = 1e-5, branch: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum x + branch (x itself without a branch), its norm times `gain`, and 1 / rms of each row.

    `x` and `branch` are (N, D) and contiguous, `gain` is (D,); the result is (sum (N, D), y (N, D), rstd (N,)), rstd in
    float32. `y` is written into the tensor given, if one is. Rows are computed in at least float32.
    """
    if runs_triton(x.device):
        from lmcore.kernels.rmsnorm import gpu as rmsnorm

        with on_device_of(x):
            return rmsnorm.rmsnorm_forward(x, gain, eps, branch, y)
    total = x if branch is None else (at_least_float32(x) + branch).to(x.dtype)
    wide = at_least_float32(total)
    rstd = (wide.square().mean(dim=-1) + eps).rsqrt()
    result = (wide * rstd[:, None] * gain).to(x.dtype)
    return total, result if y is None else y.copy_(result), rstd


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    gain: Tensor,
    rstd: Tensor,
    residual: Tensor | None = None,
    dx: Tensor | None = None,
    partials: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rmsnorm_forward`: of its input, plus `residual` if given, and partial sums of that of the gain.

    With xhat = x * rstd and w = dy * gain, the first is rstd * (w - xhat * mean(w * xhat)); `x` is the sum that was
    normalized. The gain's gradient is the sum of dy * xhat over the rows. It comes as (P, D) sums in float32 over parts
    of the rows, for P see `num_partials`: `sum_partials` adds them up for all norms of a model at once.
    """
    if runs_triton(x.device):
        from lmcore.kernels.rmsnorm import gpu as rmsnorm

        with on_device_of(x):
            return rmsnorm.rmsnorm_backward(dy, x, gain, rstd, residual, dx, partials)
    wide_dy, xhat = at_least_float32(dy), at_least_float32(x) * rstd[:, None]
    weighted = wide_dy * gain
    result = rstd[:, None] * (weighted - xhat * (weighted * xhat).mean(dim=-1, keepdim=True))
    if residual is not None:
        result = result + residual
    sums = (wide_dy * xhat).sum(dim=0, keepdim=True)
    dx = result.to(x.dtype) if dx is None else dx.copy_(result)
    return dx, sums if partials is None else partials.copy_(sums)


def num_partials(x: Tensor) -> int:
    """P, the number of partial sums that `rmsnorm_backward` makes for an input like `x` (N, D)."""
    if runs_triton(x.device):
        from lmcore.kernels.rmsnorm import gpu as rmsnorm

        return rmsnorm.num_partials(x)
    return 1


def sum_partials(partials: Tensor, out: Tensor) -> Tensor:
    """Adds up partial sums (M, P, D) of M norms into the gradients of their gains `out` (M, D), in a fixed order."""
    if runs_triton(partials.device):
        from lmcore.kernels.rmsnorm import gpu as rmsnorm

        with on_device_of(partials):
            return rmsnorm.sum_partials(partials, out)
    return torch.sum(partials, dim=1, out=out)


def rmsnorm_plain(x: Tensor, gain: Tensor, eps: float = 1e-5, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition with autograd, as `lmcore.model.RMSNorm` and the sum before it: (sum, y). For tests and timing."""
    total = x if branch is None else x + branch
    wide = at_least_float32(total)
    rms = torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return total, (wide / rms * gain).to(x.dtype)
