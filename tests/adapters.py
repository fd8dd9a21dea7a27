"""What the courses' own tests call (CSE599-O assignment 1 part 1, CS336 assignments 1 and 2): glue around lmcore.

Copy this file over `tests/adapters.py` of the course's repository, install lmcore there, and run its tests; or
`make official A2=path/to/the/repository`, which leaves it as it is.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from lmcore import functional, model, optimizer
from lmcore.checkpoint import load_checkpoint, save_checkpoint
from lmcore.config import ModelConfig
from lmcore.data.batches import get_batch
from lmcore.distributed import FSDP, BucketedDDP, OverlappedDDP, ShardedOptimizer
from lmcore.fast.kernels.attention import by_position, reference
from lmcore.tokenizer import Tokenizer, train_bpe


def _loaded(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """The module with these weights, in their type and on their device."""
    first = next(iter(weights.values()))
    module = module.to(first.device, first.dtype)
    module.load_state_dict(dict(weights))
    return module


# What has the course's parameters in the library, too
run_scaled_dot_product_attention = functional.scaled_dot_product_attention
run_gradient_clipping = optimizer.gradient_clipping
run_get_lr_cosine_schedule = get_lr_cosine_schedule = optimizer.get_lr_cosine_schedule
run_save_checkpoint, run_load_checkpoint = save_checkpoint, load_checkpoint
get_tokenizer, run_train_bpe = Tokenizer, train_bpe


def run_linear(d_in, d_out, weights, in_features):
    """`model.Linear`; weights (d_out, d_in)."""
    return _loaded(model.Linear(d_in, d_out), {"weight": weights})(in_features)


def run_embedding(vocab_size, d_model, weights, token_ids):
    """`model.Embedding`; weights (vocab_size, d_model)."""
    return _loaded(model.Embedding(vocab_size, d_model), {"weight": weights})(token_ids)


def run_rmsnorm(d_model, eps, weights, in_features):
    """`model.RMSNorm`; weights (d_model,)."""
    return _loaded(model.RMSNorm(d_model, eps), {"weight": weights})(in_features)


def run_silu(in_features):
    """`functional.silu`."""
    return functional.silu(in_features)


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    """`model.SwiGLU`; w1 and w3 (d_ff, d_model), w2 (d_model, d_ff)."""
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return _loaded(model.SwiGLU(d_model, d_ff), weights)(in_features)


def run_softmax(in_features, dim):
    """`functional.softmax`."""
    return functional.softmax(in_features, dim)


def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    """`model.RotaryPositionalEmbedding` of (..., seq, d_k)."""
    rope = model.RotaryPositionalEmbedding(theta, d_k, max_seq_len, device=in_query_or_key.device)
    return rope(in_query_or_key, token_positions)


def _attention(d_model, num_heads, rope, q, k, v, o):
    weights = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "output_proj.weight": o}
    return _loaded(model.CausalMultiHeadSelfAttention(d_model, num_heads, rope), weights)


def run_multihead_self_attention(
    d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features
):
    """`model.CausalMultiHeadSelfAttention` without positions."""
    projections = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return _attention(d_model, num_heads, None, *projections)(in_features)


def run_multihead_self_attention_with_rope(
    d_model, num_heads, max_seq_len, theta, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features,
    token_positions=None,
):  # fmt: skip
    """`model.CausalMultiHeadSelfAttention` with RoPE."""
    rope = model.RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    projections = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return _attention(d_model, num_heads, rope, *projections)(in_features, token_positions)


def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    """`model.TransformerBlock`, pre-norm with RoPE; the state dict has the names of the handout."""
    config = ModelConfig(1, max_seq_len, d_model, 1, num_heads, d_ff, rope_theta=theta)
    rope = model.RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len)
    return _loaded(model.TransformerBlock(config, rope), weights)(in_features)


def run_transformer_lm(
    vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, in_indices
):
    """`model.TransformerLM`; the state dict has the names of the handout."""
    config = ModelConfig(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta=rope_theta)
    return _loaded(model.TransformerLM(config), weights)(in_indices)


def run_cross_entropy(inputs, targets):
    """`functional.cross_entropy`."""
    return functional.cross_entropy(inputs, targets)


class DecayFirst(optimizer.AdamW):
    """`optimizer.AdamW` with weights that decay before their update: Algorithm 1 of CS336 2026."""

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                optimizer.adamw_update(p, self.state[p], group | {"weight_decay": 0.0})


def get_adamw_cls(checkout: Path = Path(__file__).parents[1]) -> type[torch.optim.Optimizer]:
    """AdamW in the course's order: after the update in CSE599-O and CS336 2025, before it in CS336 2026.

    The year is that of the newest release in the course's changelog ("## [26.0.0] 2026-03-30").
    """
    log = checkout / "CHANGELOG.md"
    released = re.findall(r"^## \[.*?\]\D*(\d{4})-\d\d-", log.read_text(encoding="utf-8"), re.M) if log.exists() else []
    return DecayFirst if max(released, default="") >= "2026" else optimizer.AdamW


def run_get_batch(dataset, batch_size, context_length, device):
    """`data.get_batch`."""
    return get_batch(dataset, batch_size, context_length, device)


# CS336 assignment 2


def _flash_attention(kernels: ModuleType, unit: float) -> type[torch.autograd.Function]:
    """An autograd function of (batch, positions, features) that saves the log-sum-exp, of which `unit` is one nat."""

    class FlashAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False):
            heads = [x.unsqueeze(1) for x in (q, k, v)]
            o, lse = kernels.forward(*heads, is_causal, by_position(heads[0]))
            ctx.lse, ctx.is_causal = lse, is_causal
            ctx.save_for_backward(q, k, v, o.squeeze(1), lse[:, 0, : q.shape[1]] * unit)
            return o.squeeze(1)

        @staticmethod
        def backward(ctx, do):
            q, k, v, o = (x.unsqueeze(1) for x in ctx.saved_tensors[:4])
            new = (by_position(q) for _ in range(3))
            gradients = kernels.backward(q, k, v, o, ctx.lse, do.unsqueeze(1).contiguous(), ctx.is_causal, *new)
            return *(gradient.squeeze(1) for gradient in gradients), None

    return FlashAttention


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """`kernels.attention.reference`: FlashAttention-2 in plain PyTorch."""
    return _flash_attention(reference, 1.0)


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """`kernels.attention.gpu`: FlashAttention-2 in Triton, whose log-sum-exp has base 2."""
    from lmcore.fast.kernels.attention import gpu

    return _flash_attention(gpu, math.log(2))


def get_ddp(module: nn.Module) -> nn.Module:
    """`distributed.OverlappedDDP`."""
    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model, optimizer) -> None:
    """Between the backward pass and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


# As 2025 names them
get_ddp_individual_parameters, ddp_individual_parameters_on_after_backward = get_ddp, ddp_on_after_backward
ddp_bucketed_on_after_backward = fsdp_on_after_backward = ddp_on_after_backward


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    """`distributed.BucketedDDP`."""
    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer) -> None:
    """Nothing is left to do at the beginning of a step."""


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """`distributed.FSDP`."""
    return FSDP(module, compute_dtype)


def fsdp_gather_full_params(fsdp_model) -> dict[str, Tensor]:
    """All parameters whole, by their names."""
    return fsdp_model.gather_full_params()


def get_sharded_optimizer(params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    """`distributed.ShardedOptimizer`."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
