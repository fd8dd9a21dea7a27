"""RoPE with attention, forward and backward, by the kernels with one program a head and by plain PyTorch."""

import pytest
import torch

from lmcore.fast.kernels.dispatch import is_hopper
from lmcore.fast.kernels.rope import rope_
from lmcore.fast.kernels.rope_attention import (
    heads_of,
    rope_attention_backward,
    rope_attention_forward,
    split_heads,
    takes_whole_heads,
)
from lmcore.functional import scaled_dot_product_attention
from lmcore.model import RotaryPositionalEmbedding, causal_mask
from lmcore.profiling.kernels import relative_error


class Example:
    """A random joint projection and gradient of the output, with what autograd in float64 makes of them."""

    def __init__(self, shape, size, dtype, device, scale=1.0):
        torch.manual_seed(size)
        batch, length, heads = self.shape = shape
        rope = RotaryPositionalEmbedding(10_000.0, size, length, device=device)
        self.angles = rope.cos, rope.sin
        qkv, self.do = (torch.randn(batch * length, n * heads * size).to(device, dtype) for n in (3, 1))
        self.qkv = scale * qkv
        reference = self.qkv.clone().double().requires_grad_()
        q, k, v = split_heads(reference, shape)
        positions = torch.arange(length, device=device)
        mask = causal_mask(length, length, device)
        out = scaled_dot_product_attention(rope(q, positions), rope(k, positions), v, mask)
        self.expected = out.transpose(1, 2).reshape(self.do.shape)
        (self.gradient,) = torch.autograd.grad(self.expected, reference, self.do.double())
        self.out = torch.full_like(self.do, float("nan"))
        self.dqkv = torch.full_like(self.qkv, float("nan"))


@pytest.mark.parametrize(("shape", "size"), [((2, 64, 1), 32), ((1, 33, 3), 20), ((2, 1, 2), 24)])
@pytest.mark.parametrize(("scale", "tolerance"), [(1.0, 1e-5), (10.0, 1e-4)])
def test_whole_heads(shape, size, scale, tolerance, device, monkeypatch):
    gpu = pytest.importorskip("lmcore.fast.kernels.rope_attention.gpu", reason="Triton is not installed")
    monkeypatch.setattr(gpu, "TILE", 32)
    e = Example(shape, size, torch.float32, device, scale)
    q_k_v, o = split_heads(e.qkv, shape), heads_of(e.out, shape)
    lse = gpu.rope_attention_forward(q_k_v, e.angles, o)
    assert relative_error(e.out, e.expected) < 1e-5
    dqkv = split_heads(e.dqkv, shape)
    gpu.rope_attention_backward(q_k_v, o, lse, heads_of(e.do, shape), dqkv, e.angles)
    assert relative_error(e.dqkv, e.gradient) < tolerance


def test_one_kernel_after_the_other(kernels, device):
    """By the reference implementations, and by the kernels, which are given the angles."""
    shape = (2, 40, 1)
    e = Example(shape, 16, torch.float32, device)
    lse = rope_attention_forward(e.qkv, e.angles, shape, e.out)
    assert (lse.shape[-1] == 40) == (kernels == "plain"), "the kernels keep whole pieces of 128 rows"
    assert rope_attention_backward(e.qkv, e.out, lse, e.do, e.dqkv, e.angles, shape) is e.dqkv
    assert relative_error(e.out, e.expected) < 1e-5
    assert relative_error(e.dqkv, e.gradient) < 1e-5


@pytest.mark.parametrize(("shape", "size"), [((2, 70, 1), 16), ((1, 33, 2), 20)])
def test_one_launch_of_the_portable_kernels_turns_all_gradients_back(shape, size, device, monkeypatch):
    gpu = pytest.importorskip("lmcore.fast.kernels.attention.gpu", reason="Triton is not installed")
    e = Example(shape, size, torch.float32, device)
    rope_(e.qkv, *e.angles, shape[1])
    q_k_v, o = split_heads(e.qkv, shape), heads_of(e.out, shape)
    _, lse = gpu.forward(*q_k_v, True, o)
    monkeypatch.setattr(gpu, "backward_tiles", lambda q: {"both": gpu.Tiles(32, 32, 4, 1)})
    dqkv = split_heads(e.dqkv, shape)
    gpu.backward(*q_k_v, o, lse, heads_of(e.do, shape), True, *dqkv, e.angles)
    assert relative_error(e.dqkv, e.gradient) < 1e-5


WHOLE = [((32, 256, 16), 32), ((80, 200, 4), 16), ((300, 61, 1), 24)]
APART = [((4, 256, 12), 64), ((2, 300, 3), 64), ((1, 130, 2), 80), ((1, 1000, 2), 128), ((3, 65, 2), 20)]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["any", "fixed"])
@pytest.mark.parametrize(("shape", "size"), WHOLE + APART)
def test_real_sizes(shape, size, order, request):
    if order == "fixed":
        request.getfixturevalue("deterministic")
    e = Example(shape, size, torch.bfloat16, torch.device("cuda"))
    assert takes_whole_heads(e.qkv, shape) == (is_hopper(torch.device("cuda")) and (shape, size) in WHOLE)
    turned = rope_(e.qkv.clone(), *e.angles, shape[1])
    lse = rope_attention_forward(e.qkv, e.angles, shape, e.out)
    assert relative_error(e.out, e.expected) < 1e-2
    assert relative_error(e.qkv, turned.double()) < 1e-4
    rope_attention_backward(e.qkv, e.out, lse, e.do, e.dqkv, e.angles, shape)
    assert relative_error(e.dqkv, e.gradient) < 1e-2
