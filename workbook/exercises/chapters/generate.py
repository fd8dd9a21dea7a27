"""Exercises of notebook 03: from logits to the next token, and the KV cache."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lmcore.functional import softmax
from workbook.exercises.exercise import normal


def _distributions() -> list[Tensor]:
    return [torch.tensor([0.5, 0.1, 0.3, 0.1]), torch.tensor([0.05, 0.05, 0.9]), softmax(normal(6), -1)]


def temperature(logits: Tensor, temperature: float) -> Tensor:
    """logits: (..., vocab). Returns the probabilities."""
    return softmax(logits / temperature, -1)


def top_k(p: Tensor, k: int) -> Tensor:
    """p: (vocab,). The distribution of the k likeliest tokens."""
    kept = p * (p >= p.topk(k).values[-1])
    return kept / kept.sum()


def top_p(p: Tensor, share: float) -> Tensor:
    """p: (vocab,). The distribution of the fewest tokens that have at least `share` together. (Holtzman et al. 2019)"""
    sorted_p, ids = p.sort(descending=True, stable=True)
    before = sorted_p.cumsum(-1) - sorted_p
    kept = torch.zeros_like(p).scatter(0, ids, sorted_p * (before < share))
    return kept / kept.sum()


def draw(p: Tensor, u: float) -> int:
    """The first token whose cumulative probability exceeds u, which is uniform in [0, 1)."""
    return int((p.cumsum(-1) <= u).sum())


def _counting(ids: list[int]) -> Tensor:
    """A model of 7 tokens whose likeliest next one depends on the whole window; 0 ends a text."""
    assert 0 < len(ids) <= 4, "the window has at most 4 ids"
    return torch.eye(7)[(3 * sum(ids) + len(ids)) % 7]


def greedy(model: Callable, ids: list[int], new: int, context: int, end: int) -> list[int]:
    """The ids and up to `new` likeliest ones, until `end`; `model` takes at most `context` ids."""
    for _ in range(new):
        ids = [*ids, int(model(ids[-context:]).argmax())]
        if ids[-1] == end:
            break
    return ids


def cached_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One new position, (heads, 1, d), on the cached ones, (heads, seq, d): output, keys and values with the new."""
    keys, values = torch.cat((keys, k), -2), torch.cat((values, v), -2)
    return softmax(q @ keys.mT / math.sqrt(q.shape[-1]), -1) @ values, keys, values


CACHE = 2 * 48 * 1600 * 1024 * 2 / 1e6
