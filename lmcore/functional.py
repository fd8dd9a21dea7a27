"""Plain tensor mathematics of the model: the definitions that every faster path is held against."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x` in float32 if it is in half precision, else as it is: what overflows or loses digits is computed so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Normalized exponentials along `dim`; same shape as `x` (section 3.5.4, equation 10).

    The maximum is subtracted first: softmax does not change when a constant is added, and exp cannot overflow. For
    the same reason nothing depends on the maximum, and it is kept out of the gradient.
    """
    exponentials = torch.exp(x - x.amax(dim=dim, keepdim=True).detach())
    return exponentials / exponentials.sum(dim=dim, keepdim=True)


def silu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x * sigmoid(x), elementwise (section 3.5.2, equation 5; Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(x)


def dropout(x: Float[Tensor, "..."], p: float, training: bool) -> Float[Tensor, "..."]:
    """Zeroes each element with probability `p` and scales the rest by 1 / (1 - p); `x` itself when not training.

    The random numbers are float32: those of half precision are too coarse for a small `p`.
    """
    if not training or p == 0.0:
        return x
    return x * (torch.rand_like(x, dtype=torch.float32) >= p) * (1.0 / (1.0 - p))


def scaled_dot_product_attention(
    Q: Float[Tensor, "... queries d_k"],
    K: Float[Tensor, "... keys d_k"],
    V: Float[Tensor, "... keys d_v"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "... queries d_v"]:
    """softmax(Q K^T / sqrt(d_k)) V (section 3.5.4, equation 11; Vaswani et al. 2017).

    `mask` is boolean and broadcasts over leading dimensions; True lets a query attend to a key. Every query must
    attend to at least one key: a row without any has no distribution, and comes out as NaN. The softmax is computed
    in float32 (or float64) whatever the precision of the matmuls.
    """
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return softmax(at_least_float32(scores), dim=-1).to(V.dtype) @ V


def cross_entropy(logits: Float[Tensor, "... vocab"], targets: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    """Mean of -log softmax(logits)[target] over all leading dimensions, in nats (section 4.1).

    With the maximum m subtracted, -log softmax(o)[t] = log(sum(exp(o - m))) - (o[t] - m): exp and log cancel for the
    target, so nothing overflows. Half-precision logits are upcast to float32.
    """
    logits = at_least_float32(logits)
    shifted = logits - logits.amax(dim=-1, keepdim=True).detach()
    log_normalizer = shifted.exp().sum(dim=-1).log()
    target_logits = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (log_normalizer - target_logits).mean()


def soft_cross_entropy(
    logits: Float[Tensor, "... vocab"], teacher_logits: Float[Tensor, "... vocab"]
) -> Float[Tensor, ""]:
    """Mean of -sum_v softmax(teacher_logits)[v] log softmax(logits)[v], in nats (Hinton et al. 2015, section 2).

    It is least where both distributions are equal. Half-precision logits are upcast to float32.
    """
    logits = at_least_float32(logits)
    expected = (softmax(at_least_float32(teacher_logits), dim=-1) * logits).sum(dim=-1)
    return (logits.logsumexp(dim=-1) - expected).mean()


def perplexity(mean_loss: float) -> float:
    """exp of a mean cross-entropy in nats (section 4.1, equation 18); infinite where exp overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
