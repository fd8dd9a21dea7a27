"""RoPE and attention after it, forward and backward: one kernel each where sequences are short and heads small.

Elsewhere the kernels `rope` and `attention` do it one after the other, each by kernels of its choice.
"""

import torch
from torch import Tensor

from lmcore.fast.kernels.attention import attention_backward, attention_forward
from lmcore.fast.kernels.dispatch import is_hopper, on_device_of
from lmcore.fast.kernels.rope import rope_

Angles = tuple[Tensor, Tensor] | None

LONGEST = 256
LARGEST_HEAD = 32
"""Sequences and head sizes whose gradients fit into a program's registers."""

FEWEST_HEADS = 264
"""Heads of all sequences from which on a program for each fills the GPU: two per multiprocessor."""


def rope_attention_forward(qkv: Tensor, angles: Angles, shape: tuple[int, int, int], out: Tensor) -> Tensor:
    """Turns queries and keys of the joint projection `qkv` (N, 3D) in place; causal attention goes into `out` (N, D).

    Returns the log-sum-exp, whose layout depends on the kernel: only `rope_attention_backward` reads it. `shape` is
    (B, T, H); `angles` are the cosines and sines of `lmcore.fast.kernels.rope`, None without RoPE.
    """
    q_k_v, o = split_heads(qkv, shape), heads_of(out, shape)
    if angles is not None and takes_whole_heads(qkv, shape):
        from lmcore.fast.kernels.rope_attention import gpu

        with on_device_of(qkv):
            return gpu.rope_attention_forward(q_k_v, angles, o)
    if angles is not None:
        rope_(qkv, *angles, shape[1])
    return attention_forward(*q_k_v, True, o)[1]


def rope_attention_backward(
    qkv: Tensor, o: Tensor, lse: Tensor, do: Tensor, dqkv: Tensor, angles: Angles, shape: tuple[int, int, int]
) -> Tensor:
    """Writes into `dqkv` (N, 3D) the gradient of the joint projection, before its queries and keys were rotated.

    `qkv` (N, 3D) and `lse` are what `rope_attention_forward` left, `o` and `do` (N, D) its output and the gradient of
    that; `shape` and `angles` as there.
    """
    q_k_v, gradients = split_heads(qkv, shape), split_heads(dqkv, shape)
    o, do = heads_of(o, shape), heads_of(do, shape)
    if angles is not None and takes_whole_heads(qkv, shape):
        from lmcore.fast.kernels.rope_attention import gpu

        with on_device_of(qkv):
            gpu.rope_attention_backward(q_k_v, o, lse, do, gradients, angles)
        return dqkv
    attention_backward(*q_k_v, o, lse, do, True, *gradients, angles=angles)
    return dqkv


def takes_whole_heads(qkv: Tensor, shape: tuple[int, int, int]) -> bool:
    """Whether the kernel with one program a head serves these."""
    return suits_whole_heads(*shape, qkv.shape[1] // (3 * shape[2]), qkv.dtype) and is_hopper(qkv.device)


def suits_whole_heads(batch: int, length: int, heads: int, size: int, dtype: torch.dtype) -> bool:
    """The same of shapes and type alone, on a Hopper GPU."""
    small = length <= LONGEST and size <= LARGEST_HEAD and batch * heads >= FEWEST_HEADS
    return small and dtype == torch.bfloat16


def heads_of(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A view (B, H, T, K) of (N, D)."""
    return x.view(*shape, -1).transpose(1, 2)


def split_heads(qkv: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """q, k and v (B, H, T, K) as views of their joint projection (N, 3D)."""
    batch, length, heads = shape
    return qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind()
