"""Exercises of notebook 03: from logits to the next token, and the KV cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmcore.functional import softmax
from workbook.exercises.exercise import exercise, normal

here = partial(exercise, notebook="03_generate")


def _distributions() -> list[Tensor]:
    return [torch.tensor([0.5, 0.1, 0.3, 0.1]), torch.tensor([0.05, 0.05, 0.9]), softmax(normal(6), -1)]


def _renormalized(p: Tensor, keep: Tensor) -> Tensor:
    return p * keep / (p * keep).sum()


here(
    "temperature",
    lambda logits, temperature: softmax(logits / temperature, -1),
    lambda: [(normal(5), temperature) for temperature in (0.5, 1.0, 2.0)],
    mistakes={
        "Hotter is flatter: multiplied or divided?": lambda logits, temperature: softmax(logits * temperature, -1),
        "The probabilities are divided; divide before softmax.": lambda logits, temperature: (
            softmax(logits, -1) / temperature
        ),
    },
    avoid=("softmax", "log_softmax"),
)


def top_k(p: Tensor, k: int) -> Tensor:
    """The distribution of the k likeliest tokens."""
    return _renormalized(p, p >= p.topk(k).values[-1])


here(
    "top_k",
    top_k,
    lambda: [(p, k) for p, k in zip(_distributions(), (1, 1, 3), strict=True)],
    mistakes={
        "What is left does not add up to one.": lambda p, k: p * (p >= p.topk(k).values[-1]),
        "One token too many is kept.": lambda p, k: top_k(p, k + 1),
    },
)


def top_p(p: Tensor, share: float, crossing: bool = True, renormalized: bool = True) -> Tensor:
    """The distribution of the fewest tokens whose probability is at least `share`."""
    sorted_p, ids = p.sort(descending=True, stable=True)
    before = sorted_p.cumsum(-1) - sorted_p
    kept = before < share if crossing else before + sorted_p <= share
    keep = torch.zeros_like(p, dtype=torch.bool).scatter(0, ids, kept)
    return _renormalized(p, keep) if renormalized else p * keep


here(
    "top_p",
    lambda p, share: top_p(p, share),
    lambda: [(_distributions()[0], 0.7), (_distributions()[2], 0.6), (_distributions()[1], 1.0)],
    mistakes={
        "The token that crosses the share is missing: the set must reach it.": partial(top_p, crossing=False),
        "What is left does not add up to one.": partial(top_p, renormalized=False),
        "Tokens above a probability are kept, whatever they add up to.": lambda p, share: _renormalized(
            p, p >= 1 - share
        ),
    },
)
here(
    "draw",
    lambda p, u: int((p.cumsum(-1) <= u).sum()),
    lambda: [(_distributions()[0], u) for u in (0.0, 0.499, 0.5, 0.65, 0.95)],
    mistakes={
        "The likeliest token is taken each time.": lambda p, u: int(p.argmax()),
        "One too far: which is the first whose cumulative probability exceeds u?": lambda p, u: min(
            int((p.cumsum(-1) <= u).sum()) + 1, len(p) - 1
        ),
    },
    avoid=("multinomial",),
)


class _Counting:
    """A model of 7 tokens whose likeliest next one depends on the whole window; 0 ends a text."""

    def __call__(self, ids: list[int]) -> Tensor:
        assert 0 < len(ids) <= 4, "the window has at most 4 ids"
        return torch.eye(7)[(3 * sum(ids) + len(ids)) % 7]


def greedy(model: Any, ids: list[int], new: int, context: int, end: int, **slip: Any) -> list[int]:
    """The ids and up to `new` likeliest ones, until `end`."""
    ids = list(ids)
    for _ in range(new):
        following = int(model(ids[-slip.get("window", context) :]).argmax())
        ids.append(following)
        if following == end and slip.get("stops", True):
            break
    return ids


here(
    "greedy",
    greedy,
    [(_Counting(), [1, 2], 6, 4, 0), (_Counting(), [5], 12, 4, 0), (_Counting(), [3, 3, 3, 4, 6], 3, 4, 0)],
    mistakes={
        "It goes on after the end of the text.": partial(greedy, stops=False),
        "The model sees one token; it needs the window before it.": partial(greedy, window=1),
        "The window is one token too short.": partial(greedy, window=3),
    },
)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One new position, (heads, 1, d), on the cached ones, (heads, seq, d): output, keys and values with the new."""
    keys, values = torch.cat((keys, k), -2), torch.cat((values, v), -2)
    return softmax(q @ keys.mT / q.shape[-1] ** 0.5, -1) @ values, keys, values


here(
    "cached_attention",
    cached_attention,
    lambda: [tuple(normal(2, n, 4) for n in (1, 1, 1, 3, 3)), tuple(normal(1, n, 8) for n in (1, 1, 1, 1, 1))],
    mistakes={
        "A position attends to itself, too: append before you attend.": lambda q, k, v, keys, values: (
            softmax(q @ keys.mT / q.shape[-1] ** 0.5, -1) @ values,
            *cached_attention(q, k, v, keys, values)[1:],
        ),
        "The new key belongs at the end.": lambda q, k, v, keys, values: (
            cached_attention(q, k, v, keys, values)[0],
            torch.cat((k, keys), -2),
            torch.cat((v, values), -2),
        ),
    },
    avoid=("scaled_dot_product_attention",),
)
CACHE = 2 * 48 * 1600 * 1024 * 2 / 1e6
here(
    "kv_cache_mb",
    CACHE,
    mistakes={
        "Keys and values are kept, both.": CACHE / 2,
        "Half precision has two bytes.": 2 * CACHE,
        "This is in MiB; MB of 10^6 bytes are asked for.": CACHE * 1e6 / 2**20,
        "Every layer has a cache of its own.": CACHE / 48,
    },
    tolerance=1e-3,
)
