"""FlashAttention-2 in plain PyTorch: attention tile by tile, without ever holding all scores (Dao 2023).

Reference implementation of `lmcore.fast.kernels.attention`, whose kernels do this for all tiles at once. It runs where
there is no Triton. Its only memory beside inputs and outputs is one tile of scores for each head.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lmcore.fast.kernels.rope import apply_rope_
from lmcore.functional import at_least_float32

TILE = 128
"""Queries and keys of a tile."""


def tiles(start: int, stop: int, tile: int) -> Iterator[slice]:
    """The positions from `start` up to `stop`, `tile` at a time; the last tile may be shorter."""
    return (slice(first, min(first + tile, stop)) for first in range(start, stop, tile))


def tile_scores(q: Tensor, k: Tensor, queries: slice, keys: slice, causal: bool) -> Tensor:
    """Scores of one tile, in at least float32: those of keys behind the query are -inf with a causal mask."""
    scores = at_least_float32(q[..., queries, :]) @ at_least_float32(k[..., keys, :]).mT / math.sqrt(q.shape[-1])
    if causal and keys.stop - 1 > queries.start:  # a tile on the diagonal: those below it need no mask
        after = torch.arange(keys.start, keys.stop, device=q.device)
        now = torch.arange(queries.start, queries.stop, device=q.device)
        scores = scores.masked_fill(after > now.unsqueeze(-1), float("-inf"))
    return scores


def forward(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"],
    causal: bool, out: Float[Tensor, "B H T K"] | None = None, tile: int = TILE,
) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H T"]]:  # fmt: skip
    """softmax(Q Kᵀ / sqrt(K)) V and the logarithm of each row's sum of exponentials (Dao 2023, algorithm 1).

    A tile of queries meets one tile of keys after the other. It carries the largest score so far, m_i, and
    the sum l_i and the weighted values acc of the exponentials relative to it; when m_i grows, both shrink by alpha.
    """
    length = q.shape[-2]
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:-1], device=q.device, dtype=at_least_float32(q[..., :0]).dtype)
    for queries in tiles(0, length, tile):
        m_i, l_i, acc = float("-inf"), 0.0, 0.0
        for keys in tiles(0, queries.stop if causal else length, tile):  # what a causal mask hides is never computed
            s = tile_scores(q, k, queries, keys, causal)
            m_new = s.amax(-1, keepdim=True).clamp_min(m_i)
            p, alpha = torch.exp(s - m_new), torch.exp(m_i - m_new)
            l_i = l_i * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[..., keys, :].to(p.dtype)
            m_i = m_new
        out[..., queries, :] = acc / l_i
        lse[..., queries] = (m_i + l_i.log()).squeeze(-1)
    return out, lse


def backward(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"],
    o: Float[Tensor, "B H T K"], lse: Float[Tensor, "B H T"], do: Float[Tensor, "B H T K"], causal: bool,
    dq: Float[Tensor, "B H T K"] | None = None, dk: Float[Tensor, "B H T K"] | None = None,
    dv: Float[Tensor, "B H T K"] | None = None, tile: int = TILE,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values (Dao 2023, algorithm 2).

    The probabilities are computed again from the scores and the log-sum-exp. A tile of keys meets one tile of queries
    after the other and gathers its own dK and dV; the parts of dQ are added up in memory. With `angles`, RoPE has
    rotated queries and keys by them, and their gradients are rotated back.
    """
    length, scale = q.shape[-2], 1 / math.sqrt(q.shape[-1])
    dq, dk, dv = (torch.empty_like(x) if given is None else given for x, given in ((q, dq), (k, dk), (v, dv)))
    wide_do = at_least_float32(do)
    delta = (wide_do * o).sum(-1)  # of each row: what the softmax's gradient subtracts
    sums = torch.zeros(q.shape, device=q.device, dtype=lse.dtype)
    for keys in tiles(0, length, tile):
        dk_tile = dv_tile = 0.0
        for queries in tiles(keys.start if causal else 0, length, tile):
            p = torch.exp(tile_scores(q, k, queries, keys, causal) - lse[..., queries, None])
            do_tile = wide_do[..., queries, :]
            dv_tile = dv_tile + p.mT @ do_tile
            ds = p * (do_tile @ v[..., keys, :].to(p.dtype).mT - delta[..., queries, None])
            dk_tile = dk_tile + ds.mT @ q[..., queries, :].to(p.dtype)
            sums[..., queries, :] += ds @ k[..., keys, :].to(p.dtype)
        dk[..., keys, :] = dk_tile * scale
        dv[..., keys, :] = dv_tile
    dq.copy_(sums * scale)
    if angles is not None:
        apply_rope_(dq, *angles, inverse=True)
        apply_rope_(dk, *angles, inverse=True)
    return dq, dk, dv
