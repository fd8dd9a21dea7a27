"""The loss by chunks, plain and in Triton, against cross_entropy(x @ weight.T) in float64."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.errors import UserError
from lmcore.fast.kernels import cross_entropy as module
from lmcore.fast.kernels.cross_entropy import (
    Lesson,
    default_chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_gradients,
    linear_cross_entropy_loss,
)
from lmcore.functional import cross_entropy, soft_cross_entropy
from lmcore.profiling.kernels import relative_error as error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative l2 error of loss and gradients; in bfloat16 that of rounding the logits and their gradients."""


def problem(device, dtype, n, vocab, d, seed=0, scale=1.0):
    """x, weight and targets; values are exact in `dtype`, so that the reference sees the same problem."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator).to(dtype)
    weight = (torch.randn(vocab, d, generator=generator) * scale * d**-0.5).to(dtype)
    targets = torch.randint(vocab, (n,), generator=generator)
    return x.to(device), weight.to(device), targets.to(device)


def reference(x, weight, targets):
    """(loss, dx, dw) of the definition in float64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = cross_entropy(x @ weight.T, targets)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def assert_near(ours, exact, tolerance) -> None:
    """Each of some tensors."""
    for a, b in zip(ours, exact, strict=True):
        assert error(a, b) < tolerance


def padded(weight, rows: int, fill: float = 3.0):
    """`weight` with rows that are no part of the vocabulary, and not zero either."""
    return torch.cat((weight, torch.full((rows, weight.shape[1]), fill, dtype=weight.dtype, device=weight.device)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "vocab", "d", "chunk_rows"), [(1, 67, 16, None), (5, 130, 24, 2)])
@pytest.mark.parametrize("rows", [0, 61])
def test_loss_and_gradients_are_those_of_the_definition(device, kernels, dtype, n, vocab, d, chunk_rows, rows):
    """The same numbers every time; padding of the vocabulary gets no gradient; a given buffer is filled."""
    x, weight, targets = problem(device, dtype, n, vocab, d)
    exact = reference(x, weight, targets)
    weight = padded(weight, rows)
    x.requires_grad_()  # outside of autograd parameters may come in, too
    given = torch.full_like(weight, 7.0)
    for dw in (None, given):
        ours = linear_cross_entropy_gradients(x, weight.requires_grad_(), targets, vocab, dw, chunk_rows)
        assert_near((*ours[:2], ours[2][:vocab]), exact, TOLERANCE[dtype])
        assert not ours[2][vocab:].any()
        assert not any(tensor.requires_grad for tensor in ours)
        assert [tensor.dtype for tensor in ours] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
    assert ours[2] is given
    assert torch.equal(given, linear_cross_entropy_gradients(x, weight, targets, vocab, None, chunk_rows)[2])
    if chunk_rows is None:
        assert torch.equal(linear_cross_entropy_loss(x, weight, targets, vocab), ours[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "vocab", "d", "chunk_rows"), [(1, 67, 16, None), (5, 130, 24, 2)])
def test_a_teacher_has_its_share_in_the_gradients_alone(device, kernels, dtype, n, vocab, d, chunk_rows):
    """Its padding counts for nothing either; with no share the gradients are those without a teacher."""
    x, weight, targets = problem(device, dtype, n, vocab, d)
    other_x, other, _ = problem(device, dtype, n, vocab, d + 8, seed=1, scale=3.0)
    wide, wide_weight = (t.double().requires_grad_() for t in (x, weight))
    logits, taught = wide @ wide_weight.T, other_x.double() @ other.double().T
    loss = cross_entropy(logits, targets)
    exact = torch.autograd.grad(0.3 * loss + 0.7 * soft_cross_entropy(logits, taught), (wide, wide_weight))
    for rows in (0, 61):
        lesson = Lesson(other_x, padded(other, rows), 0.7)
        call = partial(linear_cross_entropy_gradients, x, padded(weight, rows), targets, vocab, None, chunk_rows)
        ours = call(lesson=lesson)
        assert_near((ours[0], ours[1], ours[2][:vocab]), (loss, *exact), TOLERANCE[dtype])
        assert not ours[2][vocab:].any()
        for a, b in zip(call(lesson=lesson._replace(share=0.0)), call(), strict=True):
            assert torch.equal(a, b)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 20), st.integers(1, 25), st.integers(0, 10**6))
def test_any_shape_and_chunk(n, vocab, d, chunk_rows, seed):
    x, weight, targets = problem("cpu", torch.float64, n, vocab, d, seed)
    exact = reference(x, weight, targets)
    if seed % 2:  # strided
        x, weight, targets = x.t().contiguous().t(), weight.t().contiguous().t(), targets.repeat_interleave(2)[::2]
    ours = linear_cross_entropy_gradients(x, weight, targets, chunk_rows=chunk_rows)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


EXTREME = {
    "huge": 1e4 * torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).sign(),
    "all low": torch.full((4, 100), -1e4),
    "equal": torch.zeros(4, 100),
    "one hot": torch.eye(4, 100) * 1e4,
    "diverged": torch.eye(4, 100) * 1e30,
    "spread": torch.linspace(-1e4, 1e4, 400).view(4, 100),
}


@pytest.mark.parametrize("kind", EXTREME)
@pytest.mark.parametrize("rows", [0, 28])
def test_extreme_logits(device, kernels, kind, rows):
    """With x the identity the weight's rows are the logits' columns."""
    x, weight = torch.eye(4, device=device), EXTREME[kind].T.contiguous().to(device)
    targets = torch.tensor([0, 1, 99, 50], device=device)
    exact = reference(x, weight, targets)
    ours = linear_cross_entropy_gradients(x, padded(weight, rows, 3e4), targets, 100)
    torch.testing.assert_close(ours[0], exact[0].float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[2][:100], exact[2].float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours[1], exact[1].float(), rtol=1e-5, atol=1e-3)


def test_autograd_scales_by_what_comes_in(device, kernels):
    x, weight, targets = problem(device, torch.float32, 9, 67, 16)
    exact = reference(x, weight, targets)
    x.requires_grad_()
    weight.requires_grad_()
    for factor in (1.0, -2.5):
        loss = linear_cross_entropy(x, weight, targets)
        assert_near(torch.autograd.grad(loss * factor, (x, weight)), [factor * dx for dx in exact[1:]], 2e-6)
    hidden = torch.tanh(x)  # through something else
    (dx,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), x)
    assert error(dx, reference(hidden, weight, targets)[1] * (1 - hidden.detach().double() ** 2)) < 2e-6
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, targets), loss)


def test_autocast_computes_in_bfloat16(device, kernels):
    x, weight, targets = problem(device, torch.float32, 20, 67, 16)
    exact = reference(x, weight, targets)
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets)
    loss.backward()
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    for a, b in zip((loss.detach(), x.grad, weight.grad), exact, strict=True):
        assert 1e-7 < error(a, b) < TOLERANCE[torch.bfloat16]


@given(st.integers(1, 100_000), st.integers(128, 2**23))
def test_chunks_are_few_equal_and_within_their_memory(n, row_bytes):
    rows = default_chunk_rows(n, row_bytes, module.CHUNK_BYTES)
    assert 1 <= rows <= n
    assert rows == n or rows % 128 == 0
    assert rows * row_bytes <= max(module.CHUNK_BYTES, 128 * row_bytes)
    chunks = -(-n // rows)
    assert chunks * rows - n < 128 * chunks


def test_bad_input_is_refused():
    x, weight, targets = problem("cpu", torch.float32, 5, 13, 4)
    for bad in (
        (x[:0], weight, targets[:0]), (x, weight, targets[:3]), (x, weight.double(), targets),
        (x, weight, targets + 13), (x.half(), weight.half(), targets), (x, weight, targets.float()),
    ):  # fmt: skip
        for f in (linear_cross_entropy, linear_cross_entropy_gradients, linear_cross_entropy_loss):
            with pytest.raises(UserError):
                f(*bad)
    with pytest.raises(UserError):
        linear_cross_entropy_gradients(x, weight, torch.full((5,), 10), num_rows=10)


def test_triton_makes_the_loss_of_an_id_outside_the_vocabulary_nan(device):
    pytest.importorskip("triton")
    from lmcore.fast.kernels.cross_entropy.gpu import softmax_gradient

    for target in (-1, 67, 10**12):
        logits, losses = torch.randn(2, 128, device=device), torch.zeros(2, device=device)
        softmax_gradient(logits, torch.tensor([3, target], device=device), losses, 67, 1.0)
        assert torch.isfinite(losses[0])
        assert torch.isnan(losses[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab", "d"), [(300, 50_257, 768), (1000, 10_000, 512), (129, 513, 80)])
def test_real_sizes(dtype, n, vocab, d, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 128 * 50_304 * 2)
    x, weight, targets = problem("cuda", dtype, n, vocab, d)
    exact = reference(x, weight, targets)
    for rows in (0, -vocab % 64):
        ours = linear_cross_entropy_gradients(x, padded(weight, rows), targets, vocab)
        assert_near((*ours[:2], ours[2][:vocab]), exact, TOLERANCE[dtype])
        assert not ours[2][vocab:].any()


@pytest.mark.gpu
def test_memory_stays_small():
    """16,384 rows, GPT-2's vocabulary, d_model 768: the logits alone would be 1.53 GiB in bfloat16."""
    x, weight, targets = problem("cuda", torch.bfloat16, 16_384, 50_257, 768)
    linear_cross_entropy_gradients(x[:128], weight, targets[:128])  # workspaces of the matrix products
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy_gradients(x, weight, targets)
    assert torch.cuda.max_memory_allocated() - before <= 0.8 * 2**30
