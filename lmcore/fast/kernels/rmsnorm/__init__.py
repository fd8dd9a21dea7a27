"""RMSNorm with the residual sum before it, forward and backward (section 3.5.1; Zhang and Sennrich 2019).

In a pre-norm block the sum of the residual stream and a sublayer's output is only ever normalized and passed on, and
the gradient of the norm only ever added to the stream's: each pair is one pass over memory.
"""

from types import ModuleType

from torch import Tensor

from lmcore.fast.kernels.common.support import on_device_of, runs_triton
from lmcore.fast.kernels.rmsnorm import reference


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float = 1e-5, branch: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum x + branch (x itself without a branch), its norm times `weight`, and 1 / rms of each row.

    `x` and `branch` are (N, D) and contiguous, `weight` is (D,); the result is (sum (N, D), y (N, D), rstd (N,)), rstd
    in float32. `y` is written into the tensor given, if one is. Rows are computed in at least float32.
    """
    with on_device_of(x):
        return kernels(x).rmsnorm_forward(x, weight, eps, branch, y)


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual: Tensor | None = None,
    dx: Tensor | None = None,
    partials: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rmsnorm_forward`: of its input, plus `residual` if given, and partial sums of that of the weight.

    With xhat = x * rstd and w = dy * weight, the first is rstd * (w - xhat * mean(w * xhat)); `x` is the sum that was
    normalized. The weight's gradient is the sum of dy * xhat over the rows. It comes as (P, D) sums in float32 over
    parts of the rows, for P see `num_partials`: `sum_partials` adds them up for all norms of a model at once.
    """
    with on_device_of(x):
        return kernels(x).rmsnorm_backward(dy, x, weight, rstd, residual, dx, partials)


def num_partials(x: Tensor) -> int:
    """P, the number of partial sums that `rmsnorm_backward` makes for an input like `x` (N, D)."""
    return kernels(x).num_partials(x)


def sum_partials(partials: Tensor, out: Tensor) -> Tensor:
    """Adds up partial sums (M, P, D) of M norms into the gradients of their weights `out` (M, D), in a fixed order."""
    with on_device_of(partials):
        return kernels(partials).sum_partials(partials, out)


def kernels(x: Tensor) -> ModuleType:
    """The module whose functions serve tensors like this one."""
    if not runs_triton(x.device):
        return reference
    from lmcore.fast.kernels.rmsnorm import gpu

    return gpu
