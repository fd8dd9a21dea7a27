"""The Transformer language model from scratch, from Linear to TransformerLM (CSE599-O A1 section 3).

Of `torch.nn` only `Parameter`, containers and `init.trunc_normal_` are used. State-dict names are those of the course.
Shape letters in comments: B batch, T positions, H heads, D d_model, K head size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmcore.config import ModelConfig, named
from lmcore.errors import UserError, require
from lmcore.functional import at_least_float32, dropout, scaled_dot_product_attention, silu

ATTENTION_KERNELS = {
    "flash": "lmcore.fast.kernels.attention:flash_attention",
    "sdpa": "lmcore.fast.kernels.attention:sdpa",
}
"""Causal attention (..., heads, seq, d_k) that never materializes the scores (Dao et al. 2022), by the name in
`ModelConfig.attention`: module and function, imported when a layer first asks."""


def truncated_normal(*shape: int, std: float, device=None, dtype=None) -> nn.Parameter:
    """A parameter drawn from N(0, std^2) truncated at three standard deviations (section 3.4.1)."""
    weight = torch.empty(shape, device=device, dtype=dtype)
    return nn.Parameter(nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std))


class Linear(nn.Module):
    """y = W x without bias (section 3.4.2). `weight` has shape (out_features, in_features).

    Drawn with variance 2 / (in_features + out_features) (section 3.4.1; Glorot and Bengio 2010).
    """

    def __init__(self, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        std = math.sqrt(2 / (in_features + out_features))
        self.weight = truncated_normal(out_features, in_features, std=std, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        return x @ self.weight.T


class Embedding(nn.Module):
    """Looks up a vector for each token id (section 3.4.3). `weight` has shape (num_embeddings, embedding_dim)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, device=None, dtype=None, std: float = 1.0):
        super().__init__()
        self.weight = truncated_normal(num_embeddings, embedding_dim, std=std, device=device, dtype=dtype)

    def forward(self, token_ids: Int[Tensor, "..."]) -> Float[Tensor, "... embedding_dim"]:
        return self.weight[token_ids]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (section 3.5.1; Zhang and Sennrich 2019).

    Computed in at least float32, because squares overflow in half precision; the result has the dtype of the input.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        wide = at_least_float32(x)
        rms = torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide / rms * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """W2 (SiLU(W1 x) * W3 x), the gated feed-forward network (section 3.5.2, equation 7; Shazeer 2020)."""

    def __init__(self, d_model: int, d_ff: int, device=None, dtype=None):
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)
        self.w3 = Linear(d_model, d_ff, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class SiLUFeedForward(nn.Module):
    """W2 SiLU(W1 x), the feed-forward network without a gate, for the ablation (section 7.3, equation 25)."""

    def __init__(self, d_model: int, d_ff: int, device=None, dtype=None):
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        return self.w2(silu(self.w1(x)))


class RotaryPositionalEmbedding(nn.Module):
    """Rotates pairs of features by angles that grow with the position (section 3.5.3; Su et al. 2021).

    Pair k (from 0) of position i turns by i / theta**(2k / d_k). Cosines and sines of the first `max_seq_len`
    positions are computed once, in float64, kept in float32, and are not part of the state dict. Raises `UserError`
    if `d_k` is odd.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device=None):
        super().__init__()
        require(d_k % 2 == 0, f"RoPE rotates pairs, so the head size must be even, not {d_k}.")
        frequencies = theta ** (-torch.arange(0, d_k, 2, dtype=torch.float64) / d_k)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
        self.register_buffer("cos", angles.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().float().to(device), persistent=False)

    def forward(
        self, x: Float[Tensor, "... seq d_k"], token_positions: Int[Tensor, "... seq"]
    ) -> Float[Tensor, "... seq d_k"]:
        """Rotates `x`; `token_positions` are absolute and broadcast over the leading dimensions of `x`."""
        cos, sin = self.cos[token_positions], self.sin[token_positions]
        even, odd = at_least_float32(x[..., 0::2]), at_least_float32(x[..., 1::2])
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)


def sinusoidal_positions(max_seq_len: int, d_model: int) -> Float[Tensor, "max_seq_len d_model"]:
    """Fixed position embeddings of Vaswani et al. 2017, section 3.5: sines in even, cosines in odd features."""
    frequencies = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def causal_mask(num_queries: int, num_keys: int, device=None) -> Bool[Tensor, "queries keys"]:
    """True where a query may look: at itself and at earlier keys. The queries are the last of the keys' positions."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device) <= queries.unsqueeze(-1)


class CausalMultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention in which no position sees a later one (section 3.5.5; Vaswani et al. 2017).

    With fewer `num_kv_heads`, each head of keys and values serves a group of query heads (Ainslie et al. 2023).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        rope: RotaryPositionalEmbedding | None = None,
        device=None,
        dtype=None,
        kernel: str = "plain",  # as `ModelConfig.attention`; masks of one's own are the plain definition's
        qk_norm: bool = False,
        num_kv_heads: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        require(d_model % num_heads == 0, f"d_model ({d_model}) must be divisible by num_heads ({num_heads}).")
        self.group = num_heads // (num_kv_heads or num_heads)  # query heads for each head of keys and values
        self.d_k = d_k = d_model // num_heads
        self.rope = rope
        self.kernel = None if kernel == "plain" else named(ATTENTION_KERNELS[kernel])
        self.q_proj = Linear(d_model, d_model, device=device, dtype=dtype)
        self.k_proj = Linear(d_model, d_model // self.group, device=device, dtype=dtype)
        self.v_proj = Linear(d_model, d_model // self.group, device=device, dtype=dtype)
        self.output_proj = Linear(d_model, d_model, device=device, dtype=dtype)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(d_k, norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(d_k, norm_eps, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "... seq d_model"],
        token_positions: Int[Tensor, "... seq"] | None = None,
        mask: Bool[Tensor, "... seq keys"] | None = None,
        cache: Any = None,
    ) -> Float[Tensor, "... seq d_model"]:
        """Attends within `x`, or within `cache` and `x`. `mask` defaults to the causal one, positions to 0, 1, …

        A mask is (seq, keys), or has the leading dimensions of `x` and then serves every head alike. A cache has
        `append(k, v)`, which adds (B, H, T, K) keys and values of new positions, H the heads that these have, and
        returns those of all positions so far: see `lmcore.generate.KVCache`.
        """
        q, k, v = (
            rearrange(proj(x), "... seq (heads d_k) -> ... heads seq d_k", d_k=self.d_k)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(x.shape[-2], device=x.device)
            # every head turns alike: positions that differ within a batch get a dimension for the heads
            per_head = token_positions.unsqueeze(-2) if token_positions.ndim > 1 else token_positions
            q, k = self.rope(q, per_head), self.rope(k, per_head)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = self._attend(q, k, v, mask)
        return self.output_proj(rearrange(heads, "... heads seq d_k -> ... seq (heads d_k)"))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, dim=-3), v.repeat_interleave(self.group, dim=-3)
        if self.kernel is not None and mask is None and q.shape[-2] == k.shape[-2]:
            return self.kernel(q, k, v)
        if mask is None:
            mask = causal_mask(q.shape[-2], k.shape[-2], device=q.device)
        elif mask.ndim > 2:
            mask = mask.unsqueeze(-3)
        return scaled_dot_product_attention(q, k, v, mask)


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each with its norm and residual connection (section 3.5, equation 15).

    `config.norm` places the norm before each sublayer (pre), after each residual sum (post) or nowhere (none).
    With `config.parallel` there is one norm, and both sublayers read it.
    """

    def __init__(self, config: ModelConfig, rope: RotaryPositionalEmbedding | None = None, device=None, dtype=None):
        super().__init__()
        c, place = config, {"device": device, "dtype": dtype}
        self.norm, self.parallel, self.dropout = c.norm, c.parallel, c.dropout
        feed_forward = {"swiglu": SwiGLU, "silu": SiLUFeedForward}[c.ffn]
        self.attn = CausalMultiHeadSelfAttention(
            c.d_model, c.num_heads, rope, **place, kernel=c.attention, qk_norm=c.qk_norm, num_kv_heads=c.num_kv_heads,
            norm_eps=c.norm_eps,
        )  # fmt: skip
        self.ffn = feed_forward(c.d_model, c.d_ff, **place)
        if c.norm != "none":
            self.ln1 = RMSNorm(c.d_model, c.norm_eps, **place)
            if not c.parallel:
                self.ln2 = RMSNorm(c.d_model, c.norm_eps, **place)

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        token_positions: Int[Tensor, "... seq"] | None = None,
        mask: Bool[Tensor, "... seq keys"] | None = None,
        cache: Any = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        def attend(y: Tensor) -> Tensor:
            return dropout(self.attn(y, token_positions, mask, cache), self.dropout, self.training)

        def feed_forward(y: Tensor) -> Tensor:
            return dropout(self.ffn(y), self.dropout, self.training)

        if self.parallel:
            y = self.ln1(x)
            return x + attend(y) + feed_forward(y)
        if self.norm == "pre":
            x = x + attend(self.ln1(x))
            return x + feed_forward(self.ln2(x))
        if self.norm == "post":
            x = self.ln1(x + attend(x))
            return self.ln2(x + feed_forward(x))
        x = x + attend(x)
        return x + feed_forward(x)


def checkpointed(blocks: nn.ModuleList, every: int, x: Tensor, *arguments: Tensor | None) -> Tensor:
    """The blocks in turn, of which only the input of each run of `every` is kept for the backward pass.

    The backward pass computes a run again, with the same random numbers, before it goes back through it: the same
    operations on the same values, so that nothing but time and memory changes (Chen et al. 2016).
    """

    def run(x: Tensor, first: int) -> Tensor:
        for block in blocks[first : first + every]:
            x = block(x, *arguments)
        return x

    for first in range(0, len(blocks), every):
        x = checkpoint(run, x, first, use_reentrant=False)
    return x


class TransformerLM(nn.Module):
    """Token embedding, blocks, final norm and output embedding (sections 3.1, 3.2 and 3.6)."""

    position_embeddings: Tensor

    def __init__(self, config: ModelConfig, device=None, dtype=None):
        super().__init__()
        self.config = config
        c, place = config, {"device": device, "dtype": dtype}
        std = c.embedding_init_std
        if std is None:
            std = c.d_model**-0.5 if c.tie_embeddings else 1.0
        self.token_embeddings = Embedding(c.vocab_size, c.d_model, std=std, **place)
        rope = None
        if c.position == "rope":  # one module for all blocks: the angles are the same everywhere
            rope = RotaryPositionalEmbedding(c.rope_theta, c.d_k, c.context_length, device=device)
        elif c.position == "sinusoidal":
            positions = sinusoidal_positions(c.context_length, c.d_model).to(device)
            self.register_buffer("position_embeddings", positions, persistent=False)
        self.layers = nn.ModuleList(TransformerBlock(c, rope, **place) for _ in range(c.num_layers))
        if c.norm == "pre":  # post-norm blocks end in a norm of their own
            self.ln_final = RMSNorm(c.d_model, c.norm_eps, **place)
        self.lm_head = Linear(c.d_model, c.vocab_size, **place)
        if c.tie_embeddings:
            self.lm_head.weight = self.token_embeddings.weight

    def forward(
        self,
        token_ids: Int[Tensor, "batch seq"],
        token_positions: Int[Tensor, "... seq"] | None = None,
        mask: Bool[Tensor, "... seq keys"] | None = None,
        cache: Sequence[Any] | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the next token at every position.

        `token_positions` are 0, 1, … unless given, as they must be with a `cache`, which has one entry per layer.
        `mask` (True = attend) is causal unless given, as (seq, keys) or one per sequence.
        Raises `UserError` for more positions than `context_length` and, on the CPU, for ids outside the vocabulary.
        """
        self._check(token_ids)
        if token_positions is None:
            token_positions = torch.arange(token_ids.shape[-1], device=token_ids.device)
        x = self.token_embeddings(token_ids)
        if self.config.position == "sinusoidal":
            x = x + self.position_embeddings[token_positions].to(x.dtype)
        x = dropout(x, self.config.dropout, self.training)
        if cache is None and self.config.checkpoint_every is not None and torch.is_grad_enabled():
            x = checkpointed(self.layers, self.config.checkpoint_every, x, token_positions, mask)
        else:
            for layer, layer_cache in zip(self.layers, cache or [None] * len(self.layers), strict=True):
                x = layer(x, token_positions, mask, layer_cache)
        return self.lm_head(self.ln_final(x) if self.config.norm == "pre" else x)

    def _check(self, token_ids: Tensor) -> None:
        seq, context, vocab = token_ids.shape[-1], self.config.context_length, self.config.vocab_size
        if seq > context:  # the sentence is not made for nothing where this is compiled
            raise UserError(f"The input has {seq} positions; context_length is {context}.")
        if token_ids.device.type == "cpu" and not torch.compiler.is_compiling() and token_ids.numel():
            for id_ in (token_ids.min().item(), token_ids.max().item()):
                require(0 <= id_ < vocab, f"Token ids must be from 0 to {vocab - 1}; the input holds {id_}.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; whatever mode each part had before after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
