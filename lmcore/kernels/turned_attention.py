"""Attention's backward pass and that of RoPE before it, in one kernel where sequences are short and heads small."""

import torch
from torch import Tensor

from lmcore.kernels.attention import attention_backward
from lmcore.kernels.rope import rope_
from lmcore.kernels.support import is_hopper

LONGEST = 256
LARGEST_HEAD = 32
"""Sequences and head sizes whose gradients fit into a program's registers."""

FEWEST_HEADS = 264
"""Heads of all sequences from which on a program for each fills the GPU: two per multiprocessor."""


def turned_attention_backward(
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dqkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: tuple[int, int, int],
) -> Tensor:
    """Writes into `dqkv` (N, 3D) the gradient of the joint projection, before its queries and keys were turned.

    `qkv` (N, 3D) are the turned ones, `o` and `do` (N, D) causal attention's output and its gradient, `lse` what
    `attention_forward` gave; `shape` is (B, T, H). For `cos` and `sin` see `lmcore.kernels.rope`.
    """
    batch, length, heads = shape
    q_k_v, gradients = split_heads(qkv, shape), split_heads(dqkv, shape)
    o, do = (x.view(batch, length, heads, -1).transpose(1, 2) for x in (o, do))
    if takes_whole_heads(qkv, shape):
        from lmcore.kernels.gpu import attention_heads

        attention_heads.turned_attention_backward(q_k_v, o, lse, do, gradients, cos, sin)
        return dqkv
    attention_backward(*q_k_v, o, lse, do, True, *gradients)
    return rope_(dqkv, cos, sin, length, inverse=True)


def split_heads(qkv: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """q, k and v (B, H, T, K) as views of their joint projection (N, 3D)."""
    batch, length, heads = shape
    return qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind()


def takes_whole_heads(qkv: Tensor, shape: tuple[int, int, int]) -> bool:
    """Whether the kernel with one program a head serves these."""
    batch, length, heads = shape
    size = qkv.shape[1] // (3 * heads)
    small = length <= LONGEST and size <= LARGEST_HEAD and batch * heads >= FEWEST_HEADS
    return small and qkv.dtype == torch.bfloat16 and is_hopper(qkv.device)
