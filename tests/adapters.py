"""The course's adapters: each hands its arguments to lmcore.

To be graded, this file takes the place of tests/adapters.py in the repository of assignment 1 (CSE599-O, CS336), whose
own tests import it; lmcore must be installed there. `tests/test_adapters.py` compares it with plain PyTorch.
"""

import os
from collections.abc import Iterable
from typing import IO, Any, BinaryIO

import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lmcore import checkpoint, functional, model, optimizer
from lmcore.config import ModelConfig
from lmcore.data import batches
from lmcore.tokenizer import Tokenizer
from lmcore.tokenizer.train import train_bpe


def loaded(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The module with these weights; a name that is missing or unknown is an error."""
    module.load_state_dict(weights)
    return module


def run_linear(d_in: int, d_out: int, weights: Float[Tensor, "d_out d_in"], in_features: Float[Tensor, "... d_in"]):
    """`Linear`: (..., d_in) to (..., d_out)."""
    return loaded(model.Linear(d_in, d_out), {"weight": weights})(in_features)


def run_embedding(
    vocab_size: int, d_model: int, weights: Float[Tensor, "vocab_size d_model"], token_ids: Int[Tensor, "..."]
):
    """`Embedding`: (...) to (..., d_model)."""
    return loaded(model.Embedding(vocab_size, d_model), {"weight": weights})(token_ids)


def run_swiglu(
    d_model: int,
    d_ff: int,
    w1_weight: Float[Tensor, "d_ff d_model"],
    w2_weight: Float[Tensor, "d_model d_ff"],
    w3_weight: Float[Tensor, "d_ff d_model"],
    in_features: Float[Tensor, "... d_model"],
):
    """`SwiGLU`: W2(SiLU(W1 x) * W3 x)."""
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return loaded(model.SwiGLU(d_model, d_ff), weights)(in_features)


def run_scaled_dot_product_attention(
    Q: Float[Tensor, "... queries d_k"],
    K: Float[Tensor, "... keys d_k"],
    V: Float[Tensor, "... keys d_v"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
):
    """`scaled_dot_product_attention`; True in the mask lets a query attend to a key."""
    return functional.scaled_dot_product_attention(Q, K, V, mask)


def run_multihead_self_attention(
    d_model: int,
    num_heads: int,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Float[Tensor, "... seq d_model"],
):
    """`CausalMultiHeadSelfAttention` without RoPE."""
    attention = model.CausalMultiHeadSelfAttention(d_model, num_heads)
    return loaded(attention, attention_weights(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight))(in_features)


def run_multihead_self_attention_with_rope(
    d_model: int,
    num_heads: int,
    max_seq_len: int,
    theta: float,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Float[Tensor, "... seq d_model"],
    token_positions: Int[Tensor, "... seq"] | None = None,
):
    """`CausalMultiHeadSelfAttention` with RoPE."""
    rope = model.RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    attention = model.CausalMultiHeadSelfAttention(d_model, num_heads, rope)
    weights = attention_weights(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return loaded(attention, weights)(in_features, token_positions)


def attention_weights(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> dict[str, Tensor]:
    """The state dict of an attention module."""
    return {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "output_proj.weight": o}


def run_rope(
    d_k: int,
    theta: float,
    max_seq_len: int,
    in_query_or_key: Float[Tensor, "... seq d_k"],
    token_positions: Int[Tensor, "... seq"],
):
    """`RotaryPositionalEmbedding`."""
    return model.RotaryPositionalEmbedding(theta, d_k, max_seq_len)(in_query_or_key, token_positions)


def run_transformer_block(
    d_model: int,
    num_heads: int,
    d_ff: int,
    max_seq_len: int,
    theta: float,
    weights: dict[str, Tensor],
    in_features: Float[Tensor, "batch seq d_model"],
):
    """`TransformerBlock`: pre-norm, with RoPE."""
    config = ModelConfig(context_length=max_seq_len, d_model=d_model, num_heads=num_heads, d_ff=d_ff, rope_theta=theta)
    rope = model.RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    return loaded(model.TransformerBlock(config, rope), weights)(in_features)


def run_transformer_lm(
    vocab_size: int,
    context_length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    rope_theta: float,
    weights: dict[str, Tensor],
    in_indices: Int[Tensor, "batch seq"],
):
    """`TransformerLM`: token ids to logits, (batch, seq, vocab_size)."""
    config = ModelConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=d_ff,
        rope_theta=rope_theta,
    )
    return loaded(model.TransformerLM(config), weights)(in_indices)


def run_rmsnorm(d_model: int, eps: float, weights: Float[Tensor, "d_model"], in_features: Float[Tensor, "... d_model"]):
    """`RMSNorm`."""
    return loaded(model.RMSNorm(d_model, eps), {"weight": weights})(in_features)


def run_silu(in_features: Float[Tensor, "..."]):
    """`silu`."""
    return functional.silu(in_features)


def run_get_batch(dataset: npt.NDArray, batch_size: int, context_length: int, device: str) -> tuple[Tensor, Tensor]:
    """`get_batch`: inputs and next-token targets, int64 of shape (batch_size, context_length)."""
    return batches.get_batch(dataset, batch_size, context_length, device)


def run_softmax(in_features: Float[Tensor, "..."], dim: int):
    """`softmax` along `dim`."""
    return functional.softmax(in_features, dim)


def run_cross_entropy(inputs: Float[Tensor, "batch vocab"], targets: Int[Tensor, "batch"]):
    """`cross_entropy`: the mean over the batch, in nats."""
    return functional.cross_entropy(inputs, targets)


def run_gradient_clipping(parameters: Iterable[nn.Parameter], max_l2_norm: float) -> None:
    """`gradient_clipping`, in place."""
    optimizer.gradient_clipping(parameters, max_l2_norm)


def get_adamw_cls() -> type[torch.optim.Optimizer]:
    """`AdamW`."""
    return optimizer.AdamW


def run_get_lr_cosine_schedule(
    it: int, max_learning_rate: float, min_learning_rate: float, warmup_iters: int, cosine_cycle_iters: int
) -> float:
    """`get_lr_cosine_schedule`."""
    return optimizer.get_lr_cosine_schedule(it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters)


get_lr_cosine_schedule = run_get_lr_cosine_schedule
"""The name in the handouts' text."""


def run_save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    iteration: int,
    out: str | os.PathLike | BinaryIO | IO[bytes],
) -> None:
    """`save_checkpoint`."""
    checkpoint.save_checkpoint(model, optimizer, iteration, out)


def run_load_checkpoint(
    src: str | os.PathLike | BinaryIO | IO[bytes], model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """`load_checkpoint`: restores both and returns the iteration."""
    return checkpoint.load_checkpoint(src, model, optimizer)


def get_tokenizer(
    vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]], special_tokens: list[str] | None = None
) -> Any:
    """`Tokenizer`."""
    return Tokenizer(vocab, merges, special_tokens)


def run_train_bpe(
    input_path: str | os.PathLike, vocab_size: int, special_tokens: list[str], **kwargs: Any
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """`train_bpe`: vocabulary and merges."""
    return train_bpe(input_path, vocab_size, special_tokens, **kwargs)
