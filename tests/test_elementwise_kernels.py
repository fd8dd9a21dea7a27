"""The elementwise kernels and the plain functions beside them against float64: odd sizes, extreme values."""

import pytest
import torch
from torch import Tensor

from lmcore.fast.kernels.addition import add_
from lmcore.fast.kernels.rmsnorm import num_partials, rmsnorm_backward, rmsnorm_forward, sum_partials
from lmcore.fast.kernels.rope import rope_
from lmcore.fast.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.functional import silu
from lmcore.model import RMSNorm, RotaryPositionalEmbedding
from lmcore.profiling.kernels import relative_error

# the interpreter rounds to bfloat16 by truncation: 2**-7 at most
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def place(kernels, device) -> torch.device:
    """Where the tests' tensors are: the reference implementations are tried on the CPU."""
    return device if kernels == "triton" else torch.device("cpu")


def drawn(*shape: int, device, dtype=torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(device=device, dtype=dtype)


def assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """By norms, in float64; what is not finite has an infinite error."""
    assert out.shape == expected.shape
    assert relative_error(out, expected) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "scale"), [(7, 80, 1e4), (1, 768, 1e-4), (9, 33, 1e-30)])
@pytest.mark.parametrize("added", [False, True])
def test_rmsnorm(place, dtype, rows, d, scale, added):
    torch.manual_seed(rows)
    x, branch = (drawn(rows, d, device=place, dtype=dtype, scale=scale) for _ in range(2))
    norm, dy = RMSNorm(d, device=place, dtype=torch.float64), drawn(rows, d, device=place, dtype=dtype)
    gain = drawn(d, device=place)
    norm.weight.data.copy_(gain)
    out = {name: torch.empty_like(x) for name in ("y", "dx") if added}
    total, y, rstd = rmsnorm_forward(x, gain, 1e-5, branch if added else None, y=out.get("y"))
    assert_close(total, x.double() + branch.double() if added else x, TOLERANCE[dtype] if added else 0)
    exact = total.double().requires_grad_()
    expected = norm(exact)
    assert_close(y, expected.detach(), TOLERANCE[dtype])
    expected.backward(dy.double())
    residual = drawn(rows, d, device=place, dtype=dtype, scale=0.1 / scale) if added else None
    dx, partials = rmsnorm_backward(dy, total, gain, rstd, residual, dx=out.get("dx"))
    assert not added or (y is out["y"] and dx is out["dx"]), "it writes where it is told"
    assert partials.shape == (num_partials(total), d)
    assert_close(dx, exact.grad + (residual.double() if added else 0), TOLERANCE[dtype])
    # the terms of the sums cancel in part
    assert_close(sum_partials(partials[None], torch.empty(1, d, device=place))[0], norm.weight.grad, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "length", "heads", "size"), [(2, 5, 3, 16), (1, 9, 2, 80), (3, 4, 1, 6)])
def test_rope(place, dtype, batch, length, heads, size):
    torch.manual_seed(length)
    d = heads * size
    rope = RotaryPositionalEmbedding(10_000.0, size, length + 3, device=place)
    before = drawn(batch * length, 3 * d, device=place, dtype=dtype)
    q_k_v = before.double().view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    positions = torch.arange(length, device=place)
    expected = torch.stack((rope(q_k_v[0], positions), rope(q_k_v[1], positions), q_k_v[2]))
    rotated = before.clone()
    assert rope_(rotated, rope.cos, rope.sin, length) is rotated
    assert_close(rotated.view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4), expected, TOLERANCE[dtype])
    assert torch.equal(rotated[:, 2 * d :], before[:, 2 * d :])
    assert_close(rope_(rotated, rope.cos, rope.sin, length, inverse=True), before, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "f", "scale"), [(3, 64, 1e4), (1, 513, 30.0), (6, 7, 1.0)])
def test_swiglu(place, dtype, rows, f, scale):
    torch.manual_seed(f)
    ab, dh = drawn(rows, 2 * f, device=place, dtype=dtype, scale=scale), drawn(rows, f, device=place, dtype=dtype)
    ab[0, :3] = torch.tensor([0.0, -1e4, 1e4])
    exact = ab.double().requires_grad_()
    a, b = exact.chunk(2, dim=-1)
    expected = silu(a) * b
    h = torch.empty_like(dh)
    assert swiglu_forward(ab, h) is h
    assert_close(h, expected.detach(), TOLERANCE[dtype])
    expected.backward(dh.double())
    assert swiglu_backward_(dh, ab) is ab
    assert_close(ab, exact.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 8191, 600_001])
def test_addition_of_every_element(place, dtype, count):
    total, more = ((torch.arange(count) % n).to(device=place, dtype=dtype) for n in (101, 7))
    expected = total + more
    assert add_(total, more) is total
    assert torch.equal(total, expected)
