"""Attention's inputs, its definition in float64 to hold kernels against, and how far off they may be."""

import torch
from torch import Tensor

from lmcore.functional import scaled_dot_product_attention
from lmcore.model import causal_mask

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""Of the norm of a difference, relative to the norm: half precision rounds P and dS to it before their products."""


def packed(batch: int, length: int, heads: int, size: int, dtype=torch.float32, device="cpu", seed=0) -> list[Tensor]:
    """Q, K and V as views of one buffer, and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, 4, heads, size, generator=generator).to(device, dtype)
    return [*x[:, :, :3].clone().permute(2, 0, 3, 1, 4), x[:, :, 3].transpose(1, 2)]


def defined(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> list[Tensor]:
    """Output and gradients of the definition in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, causal_mask(q.shape[-2], q.shape[-2], q.device) if causal else None)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())]


def assert_close(found, wanted, tolerance: float, slack: float = 0.0) -> None:
    """Relative to the norm, which of gradients that vanish is a hundredth of the largest; `slack` is absolute."""
    least = max(1e-2 * reference.norm().item() for reference in wanted)
    for name, ours, reference in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        allowed = tolerance * max(reference.norm().item(), least) + slack
        assert (ours.double() - reference).norm().item() <= allowed, name


def by_module(module, q, k, v, do, causal, **options) -> list[Tensor]:
    """Output and gradients of one implementation, into views of one buffer that held something else."""
    batch, heads, length, size = q.shape
    made = torch.full((batch, length, 4, heads, size), 7.0, device=q.device, dtype=q.dtype)
    o, *gradients = made.permute(2, 0, 3, 1, 4)
    given, lse = module.forward(q, k, v, causal, o, **options)
    assert given is o
    module.backward(q, k, v, o, lse, do, causal, *gradients, **options)
    return [o, *gradients]
