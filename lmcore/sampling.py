"""Which token comes next: the distribution that temperature, top-k and top-p leave, and a draw from it (section 6)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.config import GenerateConfig
from lmcore.errors import require
from lmcore.functional import at_least_float32, softmax


def next_token_distribution(
    logits: Float[Tensor, "batch vocab"], config: GenerateConfig
) -> tuple[Float[Tensor, "batch vocab"], Int[Tensor, "batch vocab"]]:
    """The distribution that the next token is drawn from, sorted: probabilities, and the ids that they belong to.

    In this order: softmax of logits / temperature (section 6, equation 24); of it the `top_k` likeliest tokens; of
    those the smallest set whose probability is at least `top_p` (Holtzman et al. 2019), which always holds the
    likeliest. After each step what is left is scaled to sum to 1. Temperature 0 puts everything on the likeliest
    token; of equally likely ones the lower id comes first.
    """
    sorted_logits, ids = at_least_float32(logits).sort(dim=-1, descending=True, stable=True)
    # relative to the largest, so that a tiny temperature gives -inf (probability 0) and never inf / inf
    gaps = sorted_logits - sorted_logits[..., :1]
    q = softmax(gaps / max(config.temperature, torch.finfo(gaps.dtype).tiny), dim=-1)
    keep = torch.ones_like(q, dtype=torch.bool)
    if config.top_k is not None:
        keep[..., config.top_k :] = False
    if config.temperature == 0:
        keep[..., 1:] = False
    q = _renormalize(q, keep)
    if config.top_p < 1:
        # a token belongs to the nucleus if those before it do not reach top_p yet; before the first there is nothing
        keep = torch.ones_like(keep)
        keep[..., 1:] = q.cumsum(dim=-1)[..., :-1] < config.top_p
        q = _renormalize(q, keep)
    return q, ids


def _renormalize(q: Tensor, keep: Tensor) -> Tensor:
    kept = q * keep
    return kept / kept.sum(dim=-1, keepdim=True)


def sample_next(
    logits: Float[Tensor, "batch vocab"], config: GenerateConfig, generators: Sequence[torch.Generator]
) -> Int[Tensor, "batch"]:
    """One next token for every row, drawn with the row's own CPU generator.

    A row uses one uniform number u: its token is the first, in the order of `next_token_distribution`, whose
    cumulative probability exceeds u. The numbers come from the CPU, so that a seed means the same on every device.
    Raises `UserError` if a logit is not finite.
    """
    require_finite(bool(logits.isfinite().all()))
    if config.temperature == 0:
        return logits.argmax(dim=-1)
    u = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    return draw(logits, config, u.to(logits.device))


def require_finite(finite: bool) -> None:
    """Raises `UserError` unless all logits that a token was to be taken from are finite."""
    require(
        finite,
        "The model's output holds NaN or infinity, so nothing can be sampled; its weights have diverged, or the "
        "precision is too low: load an earlier checkpoint or use fp32.",
    )


def draw(
    logits: Float[Tensor, "batch vocab"], config: GenerateConfig, u: Float[Tensor, "batch"]
) -> Int[Tensor, "batch"]:
    """The token of each row for its uniform number u in [0, 1); see `sample_next`. The host does not wait for it."""
    q, ids = next_token_distribution(logits, config)
    rank = (q.cumsum(dim=-1) <= u.to(q.dtype).unsqueeze(-1)).sum(dim=-1, keepdim=True)
    # the cumulative sum may end a rounding error below 1, and u lie above it: the last token then
    rank = rank.minimum((q > 0).sum(dim=-1, keepdim=True) - 1)
    return ids.gather(-1, rank).squeeze(-1)
