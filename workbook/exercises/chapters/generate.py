"""Exercises of notebook 03: from logits to the next token, and the KV cache."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lmcore.functional import softmax
from workbook.exercises.exercise import exercise, normal

here = partial(exercise, notebook="03_generate", names=globals())


def _distributions() -> list[Tensor]:
    return [torch.tensor([0.5, 0.1, 0.3, 0.1]), torch.tensor([0.05, 0.05, 0.9]), softmax(normal(6), -1)]


@here(
    lambda: [(normal(5), temperature) for temperature in (0.5, 1.0, 2.0)],
    avoid=("softmax", "log_softmax"),
    dtypes=(torch.float64, torch.bfloat16),
)
def temperature(logits: Tensor, temperature: float) -> Tensor:
    """logits: (..., vocab). Returns the probabilities."""
    return softmax(logits / temperature, -1)


@here(lambda: [(p, k) for p, k in zip(_distributions(), (1, 1, 3), strict=True)], dtypes=(torch.float64,))
def top_k(p: Tensor, k: int) -> Tensor:
    """p: (vocab,). The distribution of the k likeliest tokens."""
    kept = p * (p >= p.topk(k).values[-1])
    return kept / kept.sum()


@here(
    lambda: [(_distributions()[0], 0.7), (_distributions()[2], 0.6), (_distributions()[1], 1.0)],
    dtypes=(torch.float64,),
)
def top_p(p: Tensor, share: float) -> Tensor:
    """p: (vocab,). The distribution of the fewest tokens that have at least `share` together. (Holtzman et al. 2019)"""
    sorted_p, ids = p.sort(descending=True, stable=True)
    before = sorted_p.cumsum(-1) - sorted_p
    kept = torch.zeros_like(p).scatter(0, ids, sorted_p * (before < share))
    return kept / kept.sum()


@here(lambda: [(_distributions()[0], u) for u in (0.0, 0.499, 0.5, 0.65, 0.95)], avoid=("multinomial",))
def draw(p: Tensor, u: float) -> int:
    """The first token whose cumulative probability exceeds u, which is uniform in [0, 1)."""
    return int((p.cumsum(-1) <= u).sum())


class _Counting:
    """A model of 7 tokens whose likeliest next one depends on the whole window; 0 ends a text."""

    def __call__(self, ids: list[int]) -> Tensor:
        assert 0 < len(ids) <= 4, "the window has at most 4 ids"
        return torch.eye(7)[(3 * sum(ids) + len(ids)) % 7]


@here([(_Counting(), [1, 2], 6, 4, 0), (_Counting(), [5], 12, 4, 0), (_Counting(), [3, 3, 3, 4, 6], 3, 4, 0)])
def greedy(model: Callable, ids: list[int], new: int, context: int, end: int) -> list[int]:
    """The ids and up to `new` likeliest ones, until `end`; `model` takes at most `context` ids."""
    for _ in range(new):
        ids = [*ids, int(model(ids[-context:]).argmax())]
        if ids[-1] == end:
            break
    return ids


@here(
    lambda: [tuple(normal(2, n, 4) for n in (1, 1, 1, 3, 3)), tuple(normal(1, n, 8) for n in (1, 1, 1, 1, 1))],
    avoid=("scaled_dot_product_attention",),
    dtypes=(torch.float64, torch.bfloat16),
)
def cached_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One new position, (heads, 1, d), on the cached ones, (heads, seq, d): output, keys and values with the new."""
    keys, values = torch.cat((keys, k), -2), torch.cat((values, v), -2)
    return softmax(q @ keys.mT / math.sqrt(q.shape[-1]), -1) @ values, keys, values


CACHE = 2 * 48 * 1600 * 1024 * 2 / 1e6
here(name="kv_cache_mb", tolerance=1e-3)(CACHE)
