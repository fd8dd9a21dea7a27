"""The same model a second time, from PyTorch's own parts: what tests hold `lmcore.model` against.

It shares nothing with the model but its weights: `torch.nn.functional` computes, and RoPE multiplies complex numbers.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmcore.config import ModelConfig

Weights = Mapping[str, Tensor]


def rotate_as_complex_numbers(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE of (..., seq, d_k): feature pairs, read as complex numbers, times e^(i position / theta^(2k / d_k))."""
    d_k = x.shape[-1]
    exponents = torch.tensor([2 * k / d_k for k in range(d_k // 2)], dtype=torch.float64)
    turns = torch.polar(torch.ones_like(exponents), positions.double().unsqueeze(-1) / theta**exponents)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], d_k // 2, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def reference_attention(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    """Causal multi-head self-attention of (batch, seq, d_model); `weights` are q_proj.weight and so on."""
    batch, seq, d_model = x.shape
    heads = {}
    for name in "qkv":
        y = F.linear(x, weights[f"{name}_proj.weight"]).view(batch, seq, -1, config.d_k).transpose(1, 2)
        if name != "v" and config.qk_norm:
            y = F.rms_norm(y, (config.d_k,), weights[f"{name}_norm.weight"], eps=config.norm_eps)
        if name != "v" and config.position == "rope":
            y = rotate_as_complex_numbers(y, torch.arange(seq), config.rope_theta)
        heads[name] = y
    mixed = F.scaled_dot_product_attention(heads["q"], heads["k"], heads["v"], is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).reshape(batch, seq, d_model), weights["output_proj.weight"])


def reference_block(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    """One Transformer block of (batch, seq, d_model); `weights` is a block's state dict."""

    def norm(y: Tensor, name: str) -> Tensor:
        return F.rms_norm(y, (config.d_model,), weights[f"{name}.weight"], eps=config.norm_eps)

    def feed_forward(y: Tensor) -> Tensor:
        hidden = F.silu(F.linear(y, weights["ffn.w1.weight"]))
        if config.ffn == "swiglu":
            hidden = hidden * F.linear(y, weights["ffn.w3.weight"])
        return F.linear(hidden, weights["ffn.w2.weight"])

    attention = partial(reference_attention, config, part_of(weights, "attn"))
    if config.parallel:
        return x + attention(norm(x, "ln1")) + feed_forward(norm(x, "ln1"))
    if config.norm == "pre":
        x = x + attention(norm(x, "ln1"))
        return x + feed_forward(norm(x, "ln2"))
    if config.norm == "post":
        x = norm(x + attention(x), "ln1")
        return norm(x + feed_forward(x), "ln2")
    x = x + attention(x)
    return x + feed_forward(x)


def reference_logits(config: ModelConfig, weights: Weights, token_ids: Tensor) -> Tensor:
    """Logits (batch, seq, vocab) for (batch, seq) token ids; `weights` is the model's state dict. Without dropout."""
    x = F.embedding(token_ids, weights["token_embeddings.weight"])
    if config.position == "sinusoidal":
        features = torch.arange(config.d_model)
        angles = torch.arange(token_ids.shape[1])[:, None] / 10_000 ** (2 * (features // 2).double() / config.d_model)
        x = x + torch.where(features % 2 == 1, angles.cos(), angles.sin()).to(x.dtype)
    for n in range(config.num_layers):
        x = reference_block(config, part_of(weights, f"layers.{n}"), x)
    if config.norm == "pre":
        x = F.rms_norm(x, (config.d_model,), weights["ln_final.weight"], eps=config.norm_eps)
    return F.linear(x, weights["lm_head.weight"])


def part_of(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights below `prefix`, by the rest of their names."""
    return {name.removeprefix(f"{prefix}."): w for name, w in weights.items() if name.startswith(f"{prefix}.")}
