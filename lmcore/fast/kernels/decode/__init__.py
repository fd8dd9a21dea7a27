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

from jaxtyping import Float, Int
from torch import Tensor

from lmcore.config import GenerateConfig
from lmcore.fast.kernels.common.support import runs_triton
from lmcore.fast.kernels.decode import reference
from lmcore.fast.kernels.decode.reference import Sequences


def norm_linear(
    x: Float[Tensor, "B D"],
    weight: Float[Tensor, "M D"],
    out: Float[Tensor, "B M"],
    eps: float = 1e-5,
    overlap: bool = False,
) -> None:
    """out = weight (x / rms(x)); see `lmcore.model.RMSNorm`."""
    if runs_triton(x.device):
        _gpu().linear(x, weight, out, norm=True, eps=eps, overlap=overlap)
        return
    reference.norm_linear(x, weight, out, eps)


def norm_swiglu(
    x: Float[Tensor, "B D"],
    weight: Float[Tensor, "2F D"],
    out: Float[Tensor, "B F"],
    eps: float = 1e-5,
    overlap: bool = False,
) -> None:
    """out = silu(W_1 y) * W_3 y with y = x / rms(x); `weight` holds W_1 above W_3."""
    if runs_triton(x.device):
        _gpu().linear(x, weight, out, norm=True, gated=True, eps=eps, overlap=overlap)
        return
    reference.norm_swiglu(x, weight, out, eps)


def linear_add(
    h: Float[Tensor, "B F"],
    weight: Float[Tensor, "D F"],
    x: Float[Tensor, "B D"],
    copy: Float[Tensor, "B D"],
    overlap: bool = False,
) -> None:
    """x += weight h, and `copy` becomes x."""
    if runs_triton(x.device):
        _gpu().linear(h, weight, x, copy=copy, add=True, overlap=overlap)
        return
    reference.linear_add(h, weight, x, copy)


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

    Row b sees its slots 0 to `positions[b]`. With `parts` and `lse`, which are scratch memory, the keys of a head are
    split among P programs (a power of two), for a long cache and few heads (flash-decoding, Dao et al. 2023).
    """
    if runs_triton(qkv.device):
        _gpu().attend(qkv, cos, sin, keys, values, positions, heads, parts, lse, overlap)
        return
    reference.attend(qkv, cos, sin, keys, values, positions, heads)


def greedy(logits: Float[Tensor, "B V"], num_ids: int, sequences: Sequences, overlap: bool = False) -> None:
    """Takes the likeliest of the first `num_ids` tokens, the lowest of equal ones; -1 if a logit is not finite.

    See `advance` for the rest.
    """
    if runs_triton(logits.device):
        _gpu().greedy(logits, num_ids, sequences, overlap)
        return
    advance(reference.greedy_tokens(logits, num_ids), sequences)


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
    if runs_triton(logits.device) and num_ids <= _gpu().MAX_SAMPLED:
        _gpu().sampled(logits, num_ids, config, uniforms, sequences, overlap)
        return
    advance(reference.sampled_tokens(logits, num_ids, config, uniforms, sequences), sequences)


def advance(chosen: Int[Tensor, "B"], sequences: Sequences) -> None:
    """Notes the chosen tokens in row `steps % capacity` of `tokens`, and makes them the input of the next step.

    `steps` and `positions` grow by one, positions to the last slot at most (a row that has ended stays there).
    """
    if runs_triton(chosen.device):
        _gpu().advance(chosen, sequences)
        return
    reference.advance(chosen, sequences)


def _gpu():
    from lmcore.fast.kernels.decode import gpu

    return gpu
