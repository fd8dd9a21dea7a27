"""RMSNorm with the residual sum before it, forward and backward (section 3.5.1; Zhang and Sennrich 2019).

In a pre-norm block the sum of the residual stream and a sublayer's output is only ever normalized and passed on, and
the gradient of the norm only ever added to the stream's: each pair is one pass over memory.
"""

import torch
from torch import Tensor

from lmcore.fast.kernels.dispatch import by_triton
from lmcore.functional import at_least_float32


@by_triton
def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float = 1e-5, branch: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum x + branch (x itself without a branch), its norm times `weight`, and 1 / rms of each row.

    `x` and `branch` are (N, D) and contiguous, `weight` is (D,); the result is (sum (N, D), y (N, D), rstd (N,)), rstd
    in float32. `y` is written into the tensor given, if one is. Rows are computed in at least float32.
    """
    total = x if branch is None else (at_least_float32(x) + branch).to(x.dtype)
    wide = at_least_float32(total)
    rstd = (wide.square().mean(dim=-1) + eps).rsqrt()
    result = (wide * rstd[:, None] * weight).to(x.dtype)
    return total, result if y is None else y.copy_(result), rstd


@by_triton
def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None, dx: Tensor | None = None,
    partials: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of `rmsnorm_forward`: of its input, plus `residual` if given, and partial sums of that of the weight.

    With xhat = x * rstd and w = dy * weight, the first is rstd * (w - xhat * mean(w * xhat)); `x` is the sum that was
    normalized. The weight's gradient is the sum of dy * xhat over the rows. It comes as (P, D) sums in float32 over
    parts of the rows, for P see `num_partials`: `sum_partials` adds them up for all norms of a model at once.
    """
    wide_dy, xhat = at_least_float32(dy), at_least_float32(x) * rstd[:, None]
    weighted = wide_dy * weight
    result = rstd[:, None] * (weighted - xhat * (weighted * xhat).mean(dim=-1, keepdim=True))
    if residual is not None:
        result = result + residual
    sums = (wide_dy * xhat).sum(dim=0, keepdim=True)
    dx = result.to(x.dtype) if dx is None else dx.copy_(result)
    return dx, sums if partials is None else partials.copy_(sums)


@by_triton
def num_partials(x: Tensor) -> int:
    """P, the number of partial sums that `rmsnorm_backward` makes for an input like `x` (N, D)."""
    return 1


@by_triton
def sum_partials(partials: Tensor, out: Tensor) -> Tensor:
    """Adds up partial sums (M, P, D) of M norms into the gradients of their weights `out` (M, D), in a fixed order."""
    return torch.sum(partials, dim=1, out=out)
