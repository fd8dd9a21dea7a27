"""The product with SwiGLU's backward pass inside against the definition in float64, and where it is taken."""

import pytest
import torch
from torch import Tensor

from lmcore.functional import silu
from lmcore.kernels.common import support
from lmcore.kernels.swiglu import goes_in_one, linear_swiglu_backward_

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def operands(n: int, d: int, f: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> list[Tensor]:
    """dy, W2 and ab, in `dtype`."""
    drawn = (torch.randn(n, d), torch.randn(d, f) / d**0.5, torch.randn(n, 2 * f) * scale)
    return [x.to(device=device, dtype=dtype) for x in drawn]


def expected(dy: Tensor, w2: Tensor, ab: Tensor) -> Tensor:
    """The gradient by autograd, in float64 on the CPU."""
    dy, w2, ab = (x.double().cpu() for x in (dy, w2, ab))
    ab.requires_grad_()
    a, b = ab.chunk(2, dim=1)
    (silu(a) * b).backward(dy @ w2)
    return ab.grad


def error(out: Tensor, right: Tensor) -> float:
    assert out.isfinite().all()
    return ((out.double().cpu() - right).norm() / right.norm()).item()


def launch(dy: Tensor, w2: Tensor, ab: Tensor) -> Tensor:
    pytest.importorskip("triton")
    from lmcore.kernels.swiglu import hopper

    return hopper.linear_swiglu_backward_(dy, w2, ab)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("n", "d", "f"), [(1, 8, 8), (130, 72, 136), (257, 64, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_the_interpreter_or_on_the_gpu(dtype, n, d, f, scale, device):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("tiles of float32 do not fit into shared memory; the interpreter takes them")
    dy, w2, ab = operands(n, d, f, dtype, device, scale)
    right = expected(dy, w2, ab)
    assert launch(dy, w2, ab) is ab
    assert error(ab, right) < TOLERANCE[dtype]


def test_the_reference_implementation():
    dy, w2, ab = operands(33, 24, 40, torch.float32, torch.device("cpu"))
    right = expected(dy, w2, ab)
    assert not goes_in_one(dy, w2)
    assert linear_swiglu_backward_(dy, w2, ab) is ab
    assert error(ab, right) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("triton", "hip"), [(True, None), (False, None), (True, "6.2")])
def test_hopper_means_nvidias_with_triton(monkeypatch, triton, hip):
    """Capability 9.0 is that of an AMD MI200, too; and nothing of Triton is imported where it is not installed."""
    monkeypatch.setattr(support, "has_triton", lambda: triton)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert support.is_hopper.__wrapped__(torch.device("cuda")) == (triton and hip is None)
    assert not support.is_hopper.__wrapped__(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "f"), [(8192, 512, 1344), (4100, 512, 1352), (5000, 264, 680), (65536, 64, 176)])
def test_it_is_that_of_the_two_kernels(n, d, f, device):
    """On Hopper, in bfloat16: near the definition, and twice the same."""
    dy, w2, ab = operands(n, d, f, torch.bfloat16, device)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("taken on Hopper alone")
    assert goes_in_one(dy, w2)
    right, again = expected(dy, w2, ab), ab.clone()
    assert error(linear_swiglu_backward_(dy, w2, ab), right) < TOLERANCE[torch.bfloat16]
    assert torch.equal(linear_swiglu_backward_(dy, w2, again), ab)
