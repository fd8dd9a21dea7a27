"""Reference of the passes of `lmcore.fast.kernels.cross_entropy` over logits and gradients, in plain PyTorch."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.functional import at_least_float32


def softmax_gradient(
    logits: Float[Tensor, "n columns"], targets: Int[Tensor, " n"], losses: Tensor, num_rows: int, scale: float | None
) -> None:
    """Writes each row's cross-entropy into `losses`, and (p - onehot(target)) * scale over the logits.

    Columns from `num_rows` on are padding: they count for nothing and get zeros. Without `scale` the logits stay.
    """
    shifted = at_least_float32(logits[:, :num_rows])
    shifted = shifted - shifted.amax(dim=-1, keepdim=True)
    exponentials = shifted.exp()
    totals = exponentials.sum(dim=-1, keepdim=True)
    torch.sub(totals.log(), shifted.gather(-1, targets.unsqueeze(-1)), out=losses.unsqueeze(-1))
    if scale is not None:
        gradient = exponentials.mul_(scale / totals)
        gradient.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(totals, -scale))
        logits[:, :num_rows] = gradient
        logits[:, num_rows:] = 0


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor * factor, a scalar, in `dtype`: a new tensor, unless nothing would change that the CPU can see."""
    if factor.device.type == "cpu" and factor.item() == 1:
        return tensor.to(dtype)
    return (tensor * factor).to(dtype)
