"""Plain tensor functions against PyTorch's own, at random shapes, extreme values and other precisions."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.functional import (
    cross_entropy,
    dropout,
    perplexity,
    scaled_dot_product_attention,
    silu,
    soft_cross_entropy,
    softmax,
)

TOLERANCES = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-2, "rtol": 2e-2},
}
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
seeds = st.integers(0, 2**31 - 1)


def randn(*shape: int, seed: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(shapes, seeds, st.data())
def test_softmax_is_pytorchs_along_any_dimension(dtype, shape, seed, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = randn(*shape, seed=seed, dtype=dtype, scale=5)
    ours = softmax(x, dim)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, F.softmax(x, dim), **TOLERANCES[dtype])


@pytest.mark.parametrize("x", [[1e4, 1e4 - 1, 0.0], [3e38, -3e38, 3e38], [-1e30, -1e30, -1e30], [0.0, -math.inf, 2.0]])
def test_softmax_of_extreme_values(x):
    x = torch.tensor(x)
    ours = softmax(x, dim=0)
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, F.softmax(x, dim=0))


def test_gradients_are_pytorchs():
    """softmax, silu, attention and cross-entropy, by finite differences in float64 and against autograd of torch."""
    x = randn(3, 6, seed=1, dtype=torch.float64).requires_grad_()
    targets, taught = torch.tensor([0, 5, 2]), randn(3, 6, seed=3, dtype=torch.float64, scale=5)
    for ours, theirs in [
        (lambda x: softmax(x, -1), lambda x: F.softmax(x, -1)),
        (silu, F.silu),
        (lambda x: cross_entropy(x, targets), lambda x: F.cross_entropy(x, targets)),
        (lambda x: soft_cross_entropy(x, taught), lambda x: F.cross_entropy(x, taught.softmax(-1))),
        (lambda x: scaled_dot_product_attention(x, x, x), lambda x: F.scaled_dot_product_attention(x, x, x)),
    ]:
        assert torch.autograd.gradcheck(ours, x)
        weights = randn(*ours(x).shape, seed=2, dtype=torch.float64)
        for at in (x, torch.zeros_like(x).requires_grad_()):  # also with ties
            gradients = [torch.autograd.grad((f(at) * weights).sum(), at)[0] for f in (ours, theirs)]
            torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_silu_is_pytorchs(dtype):
    x = torch.cat([randn(1000, seed=3, scale=4, dtype=dtype), torch.tensor([0, 1e4, -1e4, 88, -88], dtype=dtype)])
    ours = silu(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, F.silu(x), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=3), st.tuples(*[st.integers(1, 6)] * 4), seeds, st.booleans())
def test_attention_is_pytorchs_with_any_leading_dimensions(dtype, leading, sizes, seed, masked):
    queries, keys, d_k, d_v = sizes
    Q = randn(*leading, queries, d_k, seed=seed, dtype=dtype)
    K = randn(*leading, keys, d_k, seed=seed + 1, dtype=dtype)
    V = randn(*leading, keys, d_v, seed=seed + 2, dtype=dtype)
    mask = None
    if masked:
        mask = randn(queries, keys, seed=seed + 3) > 0
        mask[:, 0] = True  # every query sees something
    ours = scaled_dot_product_attention(Q, K, V, mask)
    assert ours.shape == (*leading, queries, d_v)
    assert ours.dtype == dtype
    exact = F.scaled_dot_product_attention(Q.double(), K.double(), V.double(), attn_mask=mask)
    atol, rtol = TOLERANCES[dtype]["atol"] * float(V.abs().max()), TOLERANCES[dtype]["rtol"]  # outputs are means of V
    torch.testing.assert_close(ours.double(), exact, atol=atol, rtol=rtol)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([torch.float16, torch.bfloat16]), st.integers(2, 60), seeds)
def test_attention_of_half_precision_rounds_its_softmax_once(dtype, keys, seed):
    """Computed in float32, each share has the error of its last rounding alone: half a unit in its last place."""
    scores = randn(keys, 1, seed=seed, dtype=dtype)
    shares = scaled_dot_product_attention(torch.ones(1, 1, dtype=dtype), scores, torch.eye(keys, dtype=dtype))
    exact = torch.softmax(scores[:, 0].double(), 0)
    assert ((shares[0].double() / exact - 1).abs() <= 0.501 * torch.finfo(dtype).eps).all()


def test_attention_mask_true_means_attend():
    """The handout's example: [[True, True, False]] lets the query see the first two keys, whose shares sum to 1."""
    Q, K = randn(1, 4, seed=4), randn(3, 4, seed=5)
    shares = scaled_dot_product_attention(Q, K, torch.eye(3), torch.tensor([[True, True, False]]))
    assert shares[0, 2] == 0
    assert shares[0, :2].sum().item() == pytest.approx(1)
    assert scaled_dot_product_attention(1e10 * Q, 1e10 * K, torch.eye(3)).isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 40), seeds)
def test_cross_entropy_is_pytorchs(dtype, leading, vocab_size, seed):
    logits = randn(*leading, vocab_size, seed=seed, dtype=dtype, scale=3)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocab_size, leading, generator=generator)
    wide = logits.reshape(-1, vocab_size).to(torch.promote_types(dtype, torch.float32))
    theirs = F.cross_entropy(wide, targets.flatten())
    torch.testing.assert_close(cross_entropy(logits, targets), theirs, atol=1e-5, rtol=1e-5)


def test_cross_entropy_of_extreme_logits():
    targets = torch.tensor([0, 2])
    for scale in (1e3, 1e30, -1e30):
        logits = scale * torch.tensor([[1.0, 0.5, -1.0], [0.0, 0.25, 1.0]])
        assert cross_entropy(logits, targets).isfinite()
        torch.testing.assert_close(cross_entropy(logits, targets), F.cross_entropy(logits, targets))
    half = cross_entropy(torch.tensor([[60000.0, -60000.0]], dtype=torch.float16), torch.tensor([1]))
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(120_000, rel=1e-3)


def test_perplexity():
    uniform = cross_entropy(torch.zeros(2, 3, 50), torch.zeros(2, 3, dtype=torch.long)).item()
    assert [perplexity(loss) for loss in (uniform, 0.0, 1e4)] == pytest.approx([50, 1, math.inf])
    assert math.isnan(perplexity(math.nan))


def test_dropout_drops_the_share_it_says_keeps_the_mean_and_does_nothing_in_evaluation():
    torch.manual_seed(0)
    x = torch.ones(200_000)
    dropped = dropout(x, 0.3, training=True)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.005)
    torch.testing.assert_close(dropped[dropped != 0].unique(), torch.tensor([1 / 0.7]))
    assert dropout(x, 0.3, training=False) is x
    assert dropout(x, 0.0, training=True) is x
    # half-precision random numbers are multiples of 2^-8 or 2^-11, of which 0 comes up too often for a small p
    for dtype in (torch.float16, torch.bfloat16):
        p, count = 0.001, 400_000
        output = dropout(torch.ones(count, dtype=dtype), p, training=True)
        assert output.dtype == dtype
        assert abs((output == 0).sum().item() - p * count) < 6 * math.sqrt(p * (1 - p) * count)
