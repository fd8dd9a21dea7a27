"""Attention's gradients before RoPE, by the kernel with one program a head and by its twin, against autograd."""

import pytest
import torch

from lmcore.functional import scaled_dot_product_attention
from lmcore.kernels.attention import attention_forward
from lmcore.kernels.rope import rope_
from lmcore.kernels.support import has_triton, is_hopper
from lmcore.kernels.turned_attention import split_heads, takes_whole_heads, turned_attention_backward
from lmcore.model import RotaryPositionalEmbedding, causal_mask


def gradients(shape, size, dtype, device):
    """(by the library, by autograd in float64) of the joint projection, for a random gradient of the output."""
    torch.manual_seed(size)
    batch, length, heads = shape
    rope = RotaryPositionalEmbedding(10_000.0, size, length, device=device)
    qkv, do = (torch.randn(batch * length, n * heads * size).to(device, dtype) for n in (3, 1))
    reference = qkv.double().requires_grad_()
    q, k, v = split_heads(reference, shape)
    positions = torch.arange(length, device=device)
    q, k = rope(q, positions), rope(k, positions)
    out = scaled_dot_product_attention(q, k, v, causal_mask(length, length, device))
    out.transpose(1, 2).reshape(do.shape).backward(do.double())
    turned = rope_(qkv.clone(), rope.cos, rope.sin, length)
    o = torch.empty_like(do)
    _, lse = attention_forward(*split_heads(turned, shape), True, o.view(*shape, size).transpose(1, 2))
    if device.type == "cpu":  # what the Triton kernels keep: in base 2, filled up with infinity
        lse = torch.nn.functional.pad(lse / torch.tensor(2.0).log(), (0, -length % 128), value=float("inf"))
    dqkv = torch.full_like(qkv, float("nan"))
    return (turned, o, lse, do, dqkv, rope.cos, rope.sin), reference.grad


def assert_near(out, expected, tolerance):
    error = (out.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize(("shape", "size"), [((1, 70, 2), 16), ((2, 128, 1), 32), ((1, 33, 3), 20)])
@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_whole_heads(shape, size, device):
    from lmcore.kernels.gpu import attention_heads

    (turned, o, lse, do, dqkv, cos, sin), expected = gradients(shape, size, torch.float32, device)
    o, do = (x.view(*shape, size).transpose(1, 2) for x in (o, do))
    attention_heads.turned_attention_backward(
        split_heads(turned, shape), o, lse, do, split_heads(dqkv, shape), cos, sin, tile=32
    )
    assert_near(dqkv, expected, 1e-5)


def test_the_twin():
    arguments, expected = gradients((2, 19, 3), 8, torch.float32, torch.device("cpu"))
    turned, o, lse, do, dqkv, cos, sin = arguments
    lse = lse[..., :19] * torch.tensor(2.0).log()
    assert turned_attention_backward(turned, o, lse, do, dqkv, cos, sin, (2, 19, 3)) is dqkv
    assert_near(dqkv, expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "size"), [((32, 256, 16), 32), ((80, 200, 4), 16), ((300, 61, 1), 24)])
def test_whole_heads_at_real_sizes(shape, size):
    arguments, expected = gradients(shape, size, torch.bfloat16, torch.device("cuda"))
    assert takes_whole_heads(arguments[0], shape) == is_hopper(torch.device("cuda"))
    turned_attention_backward(*arguments, shape)
    assert_near(arguments[4], expected, 1e-2)
