"""Exercises of notebook 01: tokens, the parts of the model, its loss, and what it costs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import regex
import torch
from torch import Tensor

from lmcore import accounting
from lmcore.config import model_config, replace
from lmcore.functional import (
    at_least_float32,
    scaled_dot_product_attention,
    silu,
)
from lmcore.model import causal_mask
from lmcore.tokenizer.pretokenize import GPT2_PATTERN

both = torch.float64, torch.bfloat16


def to_bytes(text: str) -> tuple[bytes, ...]:
    """The bytes of a text in UTF-8, each by itself."""
    return tuple(bytes([byte]) for byte in text.encode())


def merge_pair(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    """The word with each occurrence of `pair` joined, from left to right."""
    parts, at = [], 0
    while at < len(word):
        if word[at : at + 2] == pair:
            parts.append(pair[0] + pair[1])
            at += 2
        else:
            parts.append(word[at])
            at += 1
    return tuple(parts)


def train_bpe(counts: dict[str, int], num_merges: int) -> list[tuple[bytes, bytes]]:
    """The merges of pretokens that occur so often; of equally frequent pairs the greatest comes first."""
    words, merges = {pretoken: to_bytes(pretoken) for pretoken in counts}, []
    for _ in range(num_merges):
        pairs: Counter = Counter()
        for pretoken, word in words.items():
            for pair in pairwise(word):
                pairs[pair] += counts[pretoken]
        if not pairs:
            break
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        words = {pretoken: merge_pair(word, merges[-1]) for pretoken, word in words.items()}
    return merges


MERGES = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), (b"\xc3", b"\xa9")]


def encode_word(pretoken: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The tokens of one pretoken: every merge in the order in which it was made."""
    word = to_bytes(pretoken)
    for pair in merges:
        word = merge_pair(word, pair)
    return [*word]


VOCABULARY = {0: b"ab", 1: b"\xc3", 2: b"\xa9", 3: b"c"}


def decode(ids: list[int], vocab: dict[int, bytes]) -> str:
    """The text of these tokens, with U+FFFD for bytes that are no character."""
    return b"".join(vocab[i] for i in ids).decode("utf-8", errors="replace")


def _tokenized(solution: Any, text: str) -> dict[str, Any]:
    """What a tokenizer makes of a text, and how many texts it has read when the first id of several comes."""
    tokens = [bytes([i]) for i in range(256)] + [a + b for a, b in MERGES] + [b"<|end|>", b"<|end|><|end|>"]
    tokenizer, read = solution(dict(enumerate(tokens)), MERGES, ["<|end|>", "<|end|><|end|>"]), []
    first = next(iter(tokenizer.encode_iterable(read.append(text) or text for _ in range(3))))
    ids = tokenizer.encode(text)
    return {"ids": ids, "text": tokenizer.decode(ids), "first id": first, "texts read for it": len(read)}


class Tokenizer:
    """Byte-pair encoding with the vocabulary (id -> bytes), the merges in their order, and special tokens."""

    def __init__(self, vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]], special_tokens: Iterable[str] = ()):
        self.vocab, self.merges = vocab, merges
        self.ids = {token: i for i, token in vocab.items()}
        self.special_tokens = sorted(special_tokens, key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, in which special tokens stand for themselves."""
        special = "|".join(regex.escape(token) for token in self.special_tokens)
        tokens: list[bytes] = []
        for part in regex.split(f"({special})", text) if special else [text]:
            if part in self.special_tokens:
                tokens.append(part.encode())
                continue
            for pretoken in regex.findall(GPT2_PATTERN, part):
                tokens += encode_word(pretoken, self.merges)
        return [self.ids[token] for token in tokens]

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """The ids of one text after the other; no more texts are read than the ids need."""
        for text in texts:
            yield from self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text, with U+FFFD for bytes that are no character."""
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", errors="replace")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x: (..., d_in), weight: (d_out, d_in). Returns (..., d_out)."""
    return x @ weight.T


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids: (...), weight: (vocab, d_model). Returns (..., d_model)."""
    return weight[token_ids]


def rmsnorm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    """x: (..., d_model), gain: (d_model,). Computed in at least float32; the result has the type of x."""
    wide = at_least_float32(x)
    rms = torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide / rms * gain).to(x.dtype)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """x: (..., d_model), w1 and w3: (d_ff, d_model), w2: (d_model, d_ff). (Shazeer 2020)"""
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def rope(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """x: (..., seq, d), positions: (seq,). Pair k of position i turns by i * theta ** (-2k / d). (Su et al. 2021)"""
    k = torch.arange(0, x.shape[-1], 2, dtype=torch.float64)
    angles = positions[:, None] * theta ** (-k / x.shape[-1])
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """x: (..., seq, num_heads * d). Returns (..., num_heads, seq, d)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def attention_layer(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, num_heads: int, theta: float = 10_000.0
) -> Tensor:
    """Causal multi-head self-attention with RoPE. x: (..., seq, d_model), weights: (d_model, d_model)."""
    q, k, v = (split_heads(x @ weight.T, num_heads) for weight in (wq, wk, wv))
    positions = torch.arange(x.shape[-2])
    q, k = rope(q, positions, theta), rope(k, positions, theta)
    mask = causal_mask(len(positions), len(positions))
    heads = scaled_dot_product_attention(q, k, v, mask)
    return heads.transpose(-3, -2).flatten(-2) @ wo.T


def transformer_block(x: Tensor, attend: Callable, feed_forward: Callable, norm1: Callable, norm2: Callable) -> Tensor:
    """A pre-norm block of these functions, each of which keeps the shape of x."""
    x = x + attend(norm1(x))
    return x + feed_forward(norm2(x))


def language_model(
    token_ids: Tensor, embeddings: Tensor, blocks: list[Callable], norm: Callable, head: Tensor
) -> Tensor:
    """token_ids: (..., seq), embeddings and head: (vocab, d_model). Returns the logits, (..., seq, vocab)."""
    x = embeddings[token_ids]
    for block in blocks:
        x = block(x)
    return norm(x) @ head.T


XL = replace(model_config("xl", vocab_size=50_257, context_length=1024), d_ff=4288)
PARAMETERS, FLOPS = accounting.num_parameters(XL), accounting.forward_flops_by_component(XL)
FORWARD, HEAD = sum(FLOPS.values()), XL.vocab_size * XL.d_model
SCORES = 4 * 2 * XL.num_layers * XL.num_heads * XL.context_length**2
FIXED, ONE = 16 * PARAMETERS, 4 * sum(accounting.activation_counts(XL).values())
UPDATE = sum(accounting.ADAMW_FLOPS.values())

UNGATED = replace(XL, d_ff=6400, ffn="silu")
"""GPT-2 XL as CSE599-O counts it in `adamwAccounting`: d_ff = 4 d_model, two matrices."""
PARAMETERS_2, FORWARD_2 = accounting.num_parameters(UNGATED), accounting.forward_flops(UNGATED)
ONE_2 = 4 * sum(accounting.activation_counts(UNGATED).values())

HOURS = 3 * FORWARD * 1024 * 400_000 / (0.5 * 495e12) / 3600
DAYS = 3 * FORWARD_2 * 1024 * 400_000 / (0.5 * 19.5e12) / (24 * 3600)
