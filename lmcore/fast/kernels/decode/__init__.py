"""One decoding step in five operations a layer, written into tensors that exist, by kernels or by plain PyTorch.

For each layer, with the residual stream x (B, D) in float32, its copy c in the working precision of the weights W,
and norm(c) = c / rms(c) without a weight (the norm weights are folded into the matrices behind them):

    qkv = W_qkv norm(c)               `norm_linear`, also the output head
    heads = attention over the cache  `attend`, which turns q and k by the position and writes k and v into the cache
    x += W_o heads, c = x             `linear_add`
    h = silu(W_1 norm(c)) W_3 norm(c) `norm_swiglu`
    x += W_2 h, c = x                 `linear_add`

then `greedy` or `sampled` takes the next token. Outputs are written into tensors that exist, so that a step can be
one CUDA graph. With `overlap` a kernel may begin, on a chip that can, before the one in front of it has ended; that
is wrong for the first of a step only, which must see what the last of the step before has written.

Shape letters: B rows (sequences), D d_model, H heads, K head size, S slots of the cache, P parts that the keys are
split into, F d_ff, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.config import GenerateConfig
from lmcore.fast.kernels import dispatch
from lmcore.fast.kernels.dispatch import by_triton
from lmcore.fast.kernels.rope import apply_rope
from lmcore.functional import at_least_float32, silu
from lmcore.sampling import draw

EPS = 1e-5
"""Of the norms, as in `lmcore.model.RMSNorm`."""

MAX_SAMPLED = 1 << 14
"""Largest vocabulary of the sampling kernel, which holds the logits of a row in the registers of one program."""


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


@by_triton
def norm_linear(
    x: Float[Tensor, "B D"], weight: Float[Tensor, "M D"], out: Float[Tensor, "B M"], overlap: bool = False
) -> None:
    """out = weight (x / rms(x)); see `lmcore.model.RMSNorm`."""
    out.copy_(_normed(x) @ weight.T)


@by_triton
def norm_swiglu(
    x: Float[Tensor, "B D"], weight: Float[Tensor, "2F D"], out: Float[Tensor, "B F"], overlap: bool = False
) -> None:
    """out = silu(W_1 y) * W_3 y with y = x / rms(x); `weight` holds W_1 above W_3."""
    gate, up = at_least_float32(_normed(x) @ weight.T).chunk(2, dim=-1)
    out.copy_(silu(gate) * up)


@by_triton
def linear_add(
    h: Float[Tensor, "B F"], weight: Float[Tensor, "D F"], x: Float[Tensor, "B D"], copy: Float[Tensor, "B D"],
    sums: Float[Tensor, "P B D"] | None = None, counts: Int[Tensor, " BD"] | None = None, overlap: bool = False,
) -> None:  # fmt: skip
    """x += weight h, and `copy` becomes x.

    With `sums`, which is scratch memory, and `counts`, B D zeros, which are zeros again afterwards, the kernel for many
    rows splits F among up to P programs; their sums are added up in a fixed order.
    """
    x.add_(h @ weight.T)
    copy.copy_(x)


@by_triton
def attend(
    qkv: Float[Tensor, "B 3D"],
    cos: Float[Tensor, "positions half_K"],
    sin: Float[Tensor, "positions half_K"],
    keys: Float[Tensor, "B H S K"],
    values: Float[Tensor, "B H S K"],
    positions: Int[Tensor, "B"],
    heads: Float[Tensor, "B D"],
    parts: Float[Tensor, "P B D"] | None = None,
    lse: Float[Tensor, "P B H"] | None = None,
    overlap: bool = False,
) -> None:
    """Attention of one new position for each row: turns q and k (RoPE), puts k and v into slot `positions[b]`, attends.

    Row b sees its slots 0 to `positions[b]`. With `parts` and `lse`, which are scratch memory, the kernel splits the
    keys of a head among P programs (a power of two), for a long cache and few heads (flash-decoding, Dao et al. 2023).
    """
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


@by_triton
def greedy(logits: Float[Tensor, "B V"], num_ids: int, sequences: Sequences, overlap: bool = False) -> None:
    """Takes the likeliest of the first `num_ids` tokens, the lowest of equal ones; -1 if a logit is not finite.

    See `advance` for the rest.
    """
    logits = logits[:, :num_ids]
    advance(torch.where(logits.isfinite().all(dim=-1), logits.argmax(dim=-1), -1), sequences)


def sampled(
    logits: Float[Tensor, "B V"],
    num_ids: int,
    config: GenerateConfig,
    uniforms: Float[Tensor, "capacity B"],
    sequences: Sequences,
    overlap: bool = False,
) -> None:
    """Draws from the first `num_ids` tokens as `lmcore.sampling.draw` does; -1 if a logit is not finite.

    Row b uses the uniform number `uniforms[steps[b] % capacity, b]`. See `advance` for the rest. The kernel finds the
    token without sorting; where a uniform number is within rounding of the edge between two tokens it may take the
    other one.
    """
    if dispatch.runs_triton(logits.device) and num_ids <= MAX_SAMPLED:
        from lmcore.fast.kernels.decode import gpu

        gpu.sampled(logits, num_ids, config, uniforms, sequences, overlap)
        return
    logits = logits[:, :num_ids]
    u = uniforms.gather(0, (sequences.steps.long() % uniforms.shape[0]).unsqueeze(0)).squeeze(0)
    finite = logits.isfinite().all(dim=-1)
    chosen = draw(torch.where(finite.unsqueeze(-1), logits, 0.0), config, u)
    advance(torch.where(finite, chosen, -1), sequences)


def advance(chosen: Int[Tensor, "B"], sequences: Sequences) -> None:
    """Notes the chosen tokens in row `steps % capacity` of `tokens`, and makes them the input of the next step.

    `steps` and `positions` grow by one, positions to the last slot at most (a row that has ended stays there).
    """
    tokens, steps, positions, embedding, x, copy, num_slots = sequences
    rows = torch.arange(len(steps), device=x.device)
    tokens[steps.long() % tokens.shape[0], rows] = chosen.to(tokens.dtype)
    steps.add_(1)
    positions.add_(1).clamp_(max=num_slots - 1)
    x.copy_(embedding[chosen.clamp(min=0).long()])
    copy.copy_(x)


def _normed(x: Tensor) -> Tensor:
    wide = at_least_float32(x)
    return (wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)).to(x.dtype)
