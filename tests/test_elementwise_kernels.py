"""The elementwise kernels and the plain functions beside them against float64: odd sizes, extreme values."""

import pytest
import torch
from torch import Tensor

from lmcore.fast.kernels.addition import add_
from lmcore.fast.kernels.embedding import embedding_backward_, sorted_tokens
from lmcore.fast.kernels.rmsnorm import num_partials, rmsnorm_backward, rmsnorm_forward, sum_partials
from lmcore.fast.kernels.rope import rope_
from lmcore.fast.kernels.swiglu import goes_in_one, linear_swiglu_backward_, swiglu_backward_, swiglu_forward
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("tokens", "vocabulary", "d"), [(5, 7, 48), (130, 2, 16), (97, 40, 130)])
def test_embedding_gradient(place, dtype, accumulate, tokens, vocabulary, d):
    """Tokens that fill whole chunks, cross their ends, end with them, or are alone; one row is not finite."""
    torch.manual_seed(tokens)
    ids = torch.randint(vocabulary, (tokens,)).to(place)
    ids[: tokens // 2] = vocabulary - 1
    dx = drawn(tokens, d, device=place, dtype=dtype)
    gradient = drawn(vocabulary + 2, d, device=place, dtype=dtype)  # two tokens that never occur
    before = gradient.double()
    ids[-1] = vocabulary  # alone with its row
    dx[-1] = torch.inf
    sums = torch.zeros_like(before).index_add_(0, ids, dx.double())
    embedding_backward_(dx, *sorted_tokens(ids, vocabulary + 1), gradient, accumulate)
    assert gradient[vocabulary].isinf().all()
    occurs = torch.zeros(vocabulary + 2, dtype=torch.bool, device=place).index_fill_(0, ids[:-1], True)
    assert_close(gradient[occurs], (sums + before if accumulate else sums)[occurs], TOLERANCE[dtype])
    assert torch.equal(gradient[vocabulary + 1].double(), before[vocabulary + 1])


RUNS = [[1, 30, 1, 95, 3, 32, 9, 2, 40], [7, 9, 16, 8, 17, 1, 23], [24, 16, 32, 33, 15]]


@pytest.mark.parametrize(("chunk", "accumulate"), [(32, False), (8, True)])
@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_embedding_gradient_of_runs_that_end_anywhere(monkeypatch, device, runs, chunk, accumulate):
    """Within a chunk or several later, at the end of one or of all; more parts than are added up at a time."""
    gpu = pytest.importorskip("lmcore.fast.kernels.embedding.gpu", reason="Triton is not installed")
    monkeypatch.setattr(gpu, "tiles_of", lambda num_tokens: (chunk, 4, 2))
    monkeypatch.setattr(gpu, "PARTS", 4)
    torch.manual_seed(0)
    ids = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))[torch.randperm(sum(runs))].to(device)
    dx, before = drawn(len(ids), 5, device=device), drawn(len(runs), 5, device=device)
    expected = (before.double() * accumulate).index_add_(0, ids, dx.double())
    gpu.embedding_backward_(dx, *sorted_tokens(ids, len(runs)), before, accumulate)
    assert_close(before, expected, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("tokens", "d"), [(4096, 768), (65_536, 512)])
def test_embedding_gradient_of_text(device, tokens, d, accumulate):
    """Ids as often as words, the first a tenth of all; the same bits again."""
    from lmcore.fast.kernels.embedding import gpu

    torch.manual_seed(0)
    ids = torch.multinomial(1 / torch.arange(1, 10_001).double(), tokens, replacement=True).to(device)
    dx, before = (drawn(n, d, device=device, dtype=torch.bfloat16) for n in (tokens, 10_000))
    expected = (before.double() * accumulate).index_add_(0, ids, dx.double())
    first, second = before.clone(), before.clone()
    for gradient in (first, second):
        gpu.embedding_backward_(dx, *sorted_tokens(ids, 10_000), gradient, accumulate)
    occurs = torch.zeros(10_000, dtype=torch.bool, device=device).index_fill_(0, ids, True)
    assert_close(first[occurs], expected[occurs], 4e-3)
    assert torch.equal(first, second)
    assert torch.equal(first[~occurs], before[~occurs])


# ------------------------------------------------------------------------------------------- linear_swiglu_backward_


def operands(n: int, d: int, f: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0):
    """dy, W2 and ab, in `dtype`; and the gradient by autograd, in float64."""
    dy, w2, ab = (
        drawn(*shape, device=device, dtype=dtype, scale=s)
        for shape, s in (((n, d), 1.0), ((d, f), d**-0.5), ((n, 2 * f), scale))
    )
    exact = ab.double().requires_grad_()
    a, b = exact.chunk(2, dim=1)
    (silu(a) * b).backward(dy.double() @ w2.double())
    return dy, w2, ab, exact.grad


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("n", "d", "f"), [(1, 8, 8), (130, 72, 136)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_swiglu_in_the_interpreter_or_on_the_gpu(dtype, n, d, f, scale, device):
    hopper = pytest.importorskip("lmcore.fast.kernels.swiglu.hopper", reason="Triton is not installed")
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("tiles of float32 do not fit into shared memory; the interpreter takes them")
    dy, w2, ab, right = operands(n, d, f, dtype, device, scale)
    plain = ab.clone()
    assert hopper.linear_swiglu_backward_(dy, w2, ab) is ab
    assert_close(ab, right, TOLERANCE[dtype])
    assert not goes_in_one(dy, w2), "small: one kernel after the other"
    assert_close(linear_swiglu_backward_(dy, w2, plain), right, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "f"), [(8192, 512, 1344), (4100, 512, 1352), (5000, 264, 680), (65536, 64, 176)])
def test_linear_swiglu_in_one_on_hopper(n, d, f, device):
    """In bfloat16: near the definition, and twice the same."""
    dy, w2, ab, right = operands(n, d, f, torch.bfloat16, device)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("taken on Hopper alone")
    assert goes_in_one(dy, w2)
    again = ab.clone()
    assert_close(linear_swiglu_backward_(dy, w2, ab), right, TOLERANCE[torch.bfloat16])
    assert torch.equal(linear_swiglu_backward_(dy, w2, again), ab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 8191, 600_001])
def test_addition_of_every_element(place, dtype, count):
    total, more = ((torch.arange(count) % n).to(device=place, dtype=dtype) for n in (101, 7))
    expected = total + more
    assert add_(total, more) is total
    assert torch.equal(total, expected)
