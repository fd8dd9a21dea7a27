"""Exercises of notebook 01: tokens, the parts of the model, its loss, and what it costs."""

import math
from collections import Counter
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lmcore import accounting
from lmcore.config import model_config, replace
from lmcore.functional import cross_entropy, perplexity, scaled_dot_product_attention, silu, softmax
from lmcore.model import RMSNorm, RotaryPositionalEmbedding, causal_mask
from lmcore.tokenizer.train import merge_pretokens
from workbook.exercises.exercise import exercise, normal

here = partial(exercise, notebook="01_build")
inf = math.inf


def merge_pair(word: tuple[bytes, ...], pair: tuple[bytes, bytes], step: int = 2) -> tuple[bytes, ...]:
    """The word with each occurrence of `pair` joined, from left to right."""
    parts, at = [], 0
    while at < len(word):
        joined = word[at : at + 2] == pair
        parts.append(b"".join(pair) if joined else word[at])
        at += step if joined else 1
    return tuple(parts)


def _letters(text: str) -> tuple[bytes, ...]:
    return tuple(letter.encode() for letter in text)


here(
    "merge_pair",
    merge_pair,
    [(_letters(word), (b"a", b"b")) for word in ("abcab", "xyz", "a", "", "ba")] + [(_letters("aaaa"), (b"a", b"a"))],
    mistakes={
        "The first occurrence is joined, later ones are not.": lambda word, pair: (
            merge_pair(word[: (at := b"".join(word).find(b"".join(pair))) + 2], pair) + word[at + 2 :]
            if b"".join(pair) in b"".join(word)
            else word
        ),
        "A byte that was just joined is joined again: what comes after a pair?": partial(merge_pair, step=1),
    },
)


def train_bpe(counts: dict[str, int], num_merges: int) -> list[tuple[bytes, bytes]]:
    """The library's merges of pretokens that occur so often."""
    return merge_pretokens(Counter(counts), num_merges)[1]


def _train_bpe(counts: dict[str, int], num_merges: int, weighted: bool = True, last: bool = True) -> list:
    words = {_bytes(pretoken): count if weighted else 1 for pretoken, count in counts.items()}
    merges: list = []
    for _ in range(num_merges):
        pairs: Counter = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair)) if last else pairs.most_common(1)[0][0]
        merges.append(best)
        merged: Counter = Counter()
        for word, count in words.items():
            merged[merge_pair(word, best)] += count
        words = merged
    return merges


def _bytes(text: str) -> tuple[bytes, ...]:
    return tuple(bytes([byte]) for byte in text.encode())


here(
    "train_bpe",
    train_bpe,
    [({"low": 5, "lower": 2, "widest": 3, "newest": 6}, 8), ({"é": 3, " é": 2, "日": 1}, 4), ({"a": 9}, 3)],
    mistakes={
        "A pretoken that occurs a thousand times counts once.": partial(_train_bpe, weighted=False),
        "Of pairs that are equally frequent, another is taken first.": partial(_train_bpe, last=False),
    },
)


def encode_word(pretoken: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The tokens of one pretoken: every merge in the order in which it was made."""
    word = _bytes(pretoken)
    for pair in merges:
        word = merge_pair(word, pair)
    return [*word]


def _greedy(pretoken: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The longest token first, from the left."""
    known, rest, found = {a + b for a, b in merges}, pretoken.encode(), []
    while rest:
        size = next((n for n in range(len(rest), 1, -1) if rest[:n] in known), 1)
        found.append(rest[:size])
        rest = rest[size:]
    return found


_MERGES = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), (b"\xc3", b"\xa9")]
here(
    "encode_word",
    encode_word,
    [(word, _MERGES) for word in ("abc", "ab", "abbc", "é日", "", "xabab")],
    mistakes={
        "The longest token is taken first; training made its merges in another order.": _greedy,
        "Characters beyond ASCII are not split into bytes.": lambda pretoken, merges: (
            [*_letters(pretoken)] if not pretoken.isascii() else encode_word(pretoken, merges)
        ),
    },
)
here(
    "decode",
    lambda ids, vocab: b"".join(vocab[i] for i in ids).decode("utf-8", errors="replace"),
    [([0, 1, 2], vocab := {0: b"ab", 1: b"\xc3", 2: b"\xa9", 3: b"c"}), ([1, 3], vocab), ([], vocab)],
    mistakes={
        "A character whose bytes are in two tokens is lost: decode what was joined.": lambda ids, vocab: "".join(
            vocab[i].decode(errors="replace") for i in ids
        ),
        "Bytes that are no character disappear; the handout wants U+FFFD.": lambda ids, vocab: b"".join(
            vocab[i] for i in ids
        ).decode(errors="ignore"),
    },
)
here(
    "linear",
    lambda x, weight: x @ weight.T,
    lambda: [
        (normal(4, 3), normal(5, 3)),
        (normal(2, 4, 3), normal(3, 3)),
        (normal(3, dtype=torch.float64), normal(2, 3, dtype=torch.float64)),
    ],
    mistakes={
        "The weight is used as (d_in, d_out), its shape is (d_out, d_in).": lambda x, weight: (
            x @ weight if weight.shape[0] == weight.shape[1] else x @ weight.T
        ),
        "The result is divided by the square root of the width; nothing is to be divided.": lambda x, weight: (
            x @ weight.T / math.sqrt(x.shape[-1])
        ),
    },
    avoid=("linear", "Linear"),
)
here(
    "embedding",
    lambda token_ids, weight: weight[token_ids],
    lambda: [(torch.tensor([[0, 3], [3, 1]]), normal(4, 2)), (torch.tensor(2), normal(4, 2))],
    mistakes={
        "Ids are counted from one.": lambda token_ids, weight: weight[token_ids - 1],
        "Each vector is scaled by the square root of its width.": lambda token_ids, weight: (
            weight[token_ids] * math.sqrt(weight.shape[-1])
        ),
    },
    avoid=("embedding", "Embedding"),
)


def rmsnorm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    """The library's RMSNorm with this gain."""
    norm = RMSNorm(x.shape[-1], eps)
    norm.weight.data = gain
    return norm(x)


def _norm_cases() -> list[tuple]:
    half = (normal(2, 64, dtype=torch.bfloat16, scale=200), normal(64, dtype=torch.bfloat16), 1e-5)
    return [(normal(3, 8), normal(8), 1e-5), (normal(2, 3, 8, scale=1e-3), normal(8), 1e-5), half]


here(
    "rmsnorm",
    rmsnorm,
    _norm_cases,
    mistakes={
        "The mean is subtracted, as in LayerNorm.": lambda x, gain, eps: rmsnorm(
            x - x.mean(-1, keepdim=True), gain, eps
        ),
        "Squares are added up; their mean is asked for.": lambda x, gain, eps: (
            (y := x.float()) / (y.square().sum(-1, keepdim=True) + eps).sqrt() * gain
        ).to(x.dtype),
        "Small inputs come out wrong: where does eps stand?": lambda x, gain, eps: (
            (y := x.float()) / (y.square().mean(-1, keepdim=True).sqrt() + eps) * gain
        ).to(x.dtype),
        "In bfloat16 digits are lost: upcast before the squares.": lambda x, gain, eps: (
            x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain
        ),
    },
    avoid=("rms_norm", "RMSNorm"),
)
here(
    "swiglu",
    lambda x, w1, w2, w3: (silu(x @ w1.T) * (x @ w3.T)) @ w2.T,
    lambda: [(normal(2, 3, 4), normal(6, 4), normal(4, 6), normal(6, 4))],
    mistakes={
        "The gate and the value are exchanged: which of W1 and W3 passes SiLU?": lambda x, w1, w2, w3: (
            (silu(x @ w3.T) * (x @ w1.T)) @ w2.T
        ),
        "The gate is a sigmoid; SiLU multiplies by its input, too.": lambda x, w1, w2, w3: (
            (torch.sigmoid(x @ w1.T) * (x @ w3.T)) @ w2.T
        ),
        "Nothing is gated: the two are to be multiplied.": lambda x, w1, w2, w3: (silu(x @ w1.T) + x @ w3.T) @ w2.T,
    },
    avoid=("silu", "SiLU", "glu"),
)


def rope(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """The library's rotation."""
    return RotaryPositionalEmbedding(theta, x.shape[-1], int(positions.max()) + 1)(x, positions)


def _rotate(
    x: Tensor, positions: Tensor, theta: float, halves: bool = False, sign: int = 1, power: float = 2
) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-power * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    first, second = (x[..., :half], x[..., half:]) if halves else (x[..., 0::2], x[..., 1::2])
    cos, sin = angles.cos().float(), sign * angles.sin().float()
    parts = first * cos - second * sin, first * sin + second * cos
    return torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2)


here(
    "rope",
    rope,
    lambda: [
        (normal(2, 3, 8), torch.arange(3), 10_000.0),
        (normal(1, 2, 4), torch.tensor([5, 2]), 100.0),
        (normal(1, 64), torch.tensor([100_000]), 10_000.0),
    ],
    mistakes={
        "The angles of the pairs are right, the pairs are not: are they neighbors, or halves?": partial(
            _rotate, halves=True
        ),
        "The rotation turns the other way.": partial(_rotate, sign=-1),
        "The first pair is right, the others turn too fast: what is the exponent of pair k?": partial(_rotate, power=1),
        "Far positions are off by thousandths: in which precision are the angles computed?": (
            lambda x, positions, theta: _float32_rope(x, positions, theta)
        ),
    },
    tolerance=1e-4,
)


def _float32_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    angles = positions[:, None] * theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack(
        (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()), -1
    ).flatten(-2)


here(
    "softmax",
    softmax,
    lambda: [(normal(2, 3), -1), (normal(2, 3), 0), (torch.tensor([[1e4, 0.0], [-1e4, 3.0]]), 1)],
    mistakes={
        "Large inputs overflow: what may be subtracted before exp?": lambda x, dim: (
            x.exp() / x.exp().sum(dim, keepdim=True)
        ),
        "The last dimension is normalized, whatever `dim` says.": lambda x, dim: softmax(x, -1),
        "All numbers together add up to one; those along `dim` should.": lambda x, dim: (
            (e := (x - x.max()).exp()) / e.sum()
        ),
    },
    avoid=("softmax", "log_softmax", "Softmax"),
)


def _attention_cases() -> list[tuple]:
    two = normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 6)
    return [(*two, None), (normal(3, 4), normal(3, 4), normal(3, 2), causal_mask(3, 3)), (*two, torch.arange(5) < 3)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None, add: float = -inf
) -> Tensor:
    scores = q @ k.transpose(-2, -1) / (math.sqrt(q.shape[-1]) if scale is None else scale)
    return softmax(scores if mask is None else scores.masked_fill(~mask, add), -1) @ v


here(
    "attention",
    scaled_dot_product_attention,
    _attention_cases,
    mistakes={
        "The scores are too large: by what are they divided?": partial(_attend, scale=1.0),
        "The scores are divided by d_k, not by its square root.": lambda q, k, v, mask: _attend(
            q, k, v, mask, q.shape[-1]
        ),
        "True in the mask lets a query look; here it forbids it.": lambda q, k, v, mask: _attend(
            q, k, v, None if mask is None else ~mask
        ),
        "A forbidden key still gets weight: what is exp of the score that you give it?": partial(_attend, add=0.0),
    },
    avoid=("softmax", "log_softmax", "Softmax", "scaled_dot_product_attention"),
)
here(
    "split_heads",
    lambda x, num_heads: x.unflatten(-1, (num_heads, -1)).transpose(-3, -2),
    lambda: [(normal(2, 3, 8), 2), (normal(3, 6), 3)],
    mistakes={
        "A head takes features of several positions: split the last dimension, then move it.": lambda x, num_heads: (
            x.reshape(*x.shape[:-2], num_heads, x.shape[-2], -1)
        ),
        "Features are dealt out in turn; each head has a run of neighbors.": lambda x, num_heads: x.unflatten(
            -1, (-1, num_heads)
        ).movedim(-1, -3),
    },
)
here(
    "cross_entropy",
    cross_entropy,
    lambda: [
        (normal(4, 5), torch.tensor([0, 4, 2, 2])),
        (normal(2, 3, 7), torch.tensor([[0, 1, 2], [3, 4, 6]])),
        (torch.tensor([[1e4, -1e4]]), torch.tensor([1])),
    ],
    mistakes={
        "The losses are added up; their mean is asked for.": lambda logits, targets: (
            cross_entropy(logits, targets) * targets.numel()
        ),
        "Large logits give infinity or NaN: cancel log against exp.": lambda logits, targets: (
            -(logits.exp() / logits.exp().sum(-1, keepdim=True)).log().gather(-1, targets[..., None]).mean()
        ),
        "The sign is the other way round.": lambda logits, targets: -cross_entropy(logits, targets),
        "The loss is in bits; it should be in nats.": lambda logits, targets: (
            cross_entropy(logits, targets) / math.log(2)
        ),
    },
    avoid=("cross_entropy", "nll_loss", "log_softmax", "softmax", "logsumexp"),
)
here(
    "perplexity",
    perplexity,
    [(0.0,), (1.5,), (math.log(50_257),)],
    mistakes={
        "The loss is in nats, so the base is not 2.": lambda loss: 2.0**loss,
        "A loss is negative log-likelihood: the sign is the other way round.": lambda loss: math.exp(-loss),
    },
)

XL = replace(model_config("xl", vocab_size=50_257, context_length=1024), d_ff=4288)
PARAMETERS, FLOPS = accounting.num_parameters(XL), accounting.forward_flops_by_component(XL)
FORWARD = sum(FLOPS.values())
BINARY = "This is in GiB; the handout counts in GB of 10^9 bytes."
HALF = "A multiply-add is two operations."
here(
    "xl_parameters",
    PARAMETERS,
    mistakes={
        "The LM head's matrix is missing: it is not shared with the embedding.": PARAMETERS
        - XL.vocab_size * XL.d_model,
        "The gate's matrix W3 is missing in each layer.": PARAMETERS - XL.num_layers * XL.d_model * XL.d_ff,
        "The gains of the norms are missing.": PARAMETERS - (2 * XL.num_layers + 1) * XL.d_model,
    },
    tolerance=1e-9,
)
here(
    "xl_weight_gb",
    4 * PARAMETERS / 1e9,
    mistakes={
        BINARY: 4 * PARAMETERS / 2**30,
        "A float32 has four bytes.": 2 * PARAMETERS / 1e9,
        "The LM head's matrix is missing.": 4 * (PARAMETERS - XL.vocab_size * XL.d_model) / 1e9,
    },
    tolerance=5e-3,
)
here(
    "xl_flops",
    FORWARD,
    mistakes={
        HALF: FORWARD / 2,
        "The LM head's share is missing.": FORWARD - FLOPS["lm_head"],
        "The attention scores and their weighted sums are missing.": FORWARD - FLOPS["scores"] - FLOPS["weighted_sum"],
        "This is one layer; there are 48.": (FORWARD - FLOPS["lm_head"]) / XL.num_layers,
    },
    tolerance=2e-3,
)


TRAINED = accounting.activation_counts(XL)
FIXED, ONE = 16 * PARAMETERS, 4 * sum(TRAINED.values())
here(
    "xl_state_gb",
    FIXED / 1e9,
    mistakes={
        "Four numbers are kept for each parameter: itself, its gradient, two moments.": FIXED * 3 / 4 / 1e9,
        BINARY: FIXED / 2**30,
        "A float32 has four bytes.": FIXED / 2 / 1e9,
    },
    tolerance=5e-3,
)
here(
    "xl_activations_gb",
    ONE / 1e9,
    mistakes={
        "The attention scores grow with the square of the context, in every head.": (
            ONE / 1e9 - 4 * 2 * XL.num_layers * XL.num_heads * XL.context_length**2 / 1e9
        ),
        BINARY: ONE / 2**30,
        "This is one layer; there are 48.": ONE / 1e9 / XL.num_layers,
    },
    tolerance=2e-2,
)
HOURS = 3 * FORWARD * 1024 * 400_000 / (0.5 * 495e12) / 3600
here(
    "xl_training_hours",
    HOURS,
    mistakes={
        "The backward pass takes twice the FLOPs of the forward pass; both are a step.": HOURS / 3,
        "The backward pass takes twice the FLOPs of the forward pass, not as many.": HOURS * 2 / 3,
        "The MFU is a half: only half of the peak is reached.": HOURS / 2,
    },
    tolerance=1e-2,
)
