"""Reference implementation of `lmcore.fast.kernels.decode` in plain PyTorch, and the state that a step hands on."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.config import GenerateConfig
from lmcore.fast.kernels.rope.reference import apply_rope
from lmcore.functional import at_least_float32, silu
from lmcore.sampling import draw


class Sequences(NamedTuple):
    """What the end of a step writes, and the next one begins with."""

    tokens: Int[Tensor, "capacity B"]
    """A ring: row `steps % capacity` takes the tokens of this step."""
    steps: Int[Tensor, "B"]
    positions: Int[Tensor, "B"]
    embedding: Float[Tensor, "V D"]
    x: Float[Tensor, "B D"]
    copy: Float[Tensor, "B D"]
    num_slots: int
    """The last slot is where a row that has ended stays."""


def norm_linear(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """See `lmcore.fast.kernels.decode.norm_linear`."""
    out.copy_(_normed(x, eps) @ weight.T)


def norm_swiglu(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """See `lmcore.fast.kernels.decode.norm_swiglu`."""
    gate, up = at_least_float32(_normed(x, eps) @ weight.T).chunk(2, dim=-1)
    out.copy_(silu(gate) * up)


def linear_add(h: Tensor, weight: Tensor, x: Tensor, copy: Tensor) -> None:
    """See `lmcore.fast.kernels.decode.linear_add`."""
    x.add_(h @ weight.T)
    copy.copy_(x)


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor, heads: Tensor
) -> None:
    """See `lmcore.fast.kernels.decode.attend`."""
    batch, num_heads, slots, head_size = keys.shape
    q, k, v = qkv.view(batch, 3, num_heads, head_size).unbind(1)
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    rows = torch.arange(batch, device=keys.device)
    keys[rows, :, positions] = apply_rope(k, cos, sin).to(keys.dtype)
    values[rows, :, positions] = v.to(values.dtype)
    used = int(positions.max()) + 1 if positions.device.type == "cpu" else slots
    scores = torch.einsum("bhk,bhsk->bhs", apply_rope(q, cos, sin), keys[:, :, :used].to(q.dtype))
    scores = scores / math.sqrt(head_size)
    hidden = torch.arange(used, device=keys.device) > positions.unsqueeze(-1)
    scores.masked_fill_(hidden.unsqueeze(1), -math.inf)
    heads.copy_(torch.einsum("bhs,bhsk->bhk", scores.softmax(dim=-1), values[:, :, :used].to(q.dtype)).flatten(1))


def greedy_tokens(logits: Tensor, num_ids: int) -> Tensor:
    """The token of each row that `lmcore.fast.kernels.decode.greedy` takes."""
    logits = logits[:, :num_ids]
    return torch.where(logits.isfinite().all(dim=-1), logits.argmax(dim=-1), -1)


def sampled_tokens(
    logits: Tensor, num_ids: int, config: GenerateConfig, uniforms: Tensor, sequences: Sequences
) -> Tensor:
    """The token of each row that `lmcore.fast.kernels.decode.sampled` takes."""
    logits = logits[:, :num_ids]
    u = uniforms.gather(0, (sequences.steps.long() % uniforms.shape[0]).unsqueeze(0)).squeeze(0)
    finite = logits.isfinite().all(dim=-1)
    chosen = draw(torch.where(finite.unsqueeze(-1), logits, 0.0), config, u)
    return torch.where(finite, chosen, -1)


def advance(chosen: Tensor, sequences: Sequences) -> None:
    """See `lmcore.fast.kernels.decode.advance`."""
    tokens, steps, positions, embedding, x, copy, num_slots = sequences
    rows = torch.arange(len(steps), device=x.device)
    tokens[steps.long() % tokens.shape[0], rows] = chosen.to(tokens.dtype)
    steps.add_(1)
    positions.add_(1).clamp_(max=num_slots - 1)
    x.copy_(embedding[chosen.clamp(min=0).long()])
    copy.copy_(x)


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return (wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
