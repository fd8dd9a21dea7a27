"""Reference of `lmcore.fast.kernels.rope_attention` in plain PyTorch, and how heads lie in a projection."""

from torch import Tensor

from lmcore.fast.kernels.attention import reference as attention
from lmcore.fast.kernels.rope.reference import apply_rope_


def rope_attention_forward(q_k_v: tuple[Tensor, ...], cos: Tensor, sin: Tensor, o: Tensor) -> Tensor:
    """Turns q and k (B, H, T, K) in place, writes causal attention into `o` (B, H, T, K), returns the log-sum-exp."""
    q, k, v = q_k_v
    apply_rope_(q, cos, sin)
    apply_rope_(k, cos, sin)
    return attention.forward(q, k, v, True, o)[1]


def rope_attention_backward(
    q_k_v: tuple[Tensor, ...],
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    gradients: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Writes into `gradients` those of q, k and v before q and k were rotated; `lse` from `rope_attention_forward`."""
    attention.backward(*q_k_v, o, lse, do, True, *gradients, angles=(cos, sin))


def heads_of(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A view (B, H, T, K) of (N, D)."""
    return x.view(*shape, -1).transpose(1, 2)


def split_heads(qkv: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """q, k and v (B, H, T, K) as views of their joint projection (N, 3D)."""
    batch, length, heads = shape
    return qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind()
