"""The model's modules against PyTorch's own and a second, independently written model (model_reference)."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_reference import reference_logits

from lmcore.config import ModelConfig, model_config, replace
from lmcore.errors import UserError
from lmcore.functional import cross_entropy
from lmcore.model import (
    CausalMultiHeadSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryPositionalEmbedding,
    TransformerLM,
    causal_mask,
    sinusoidal_positions,
)

TINY = ModelConfig(vocab_size=61, context_length=24, d_model=24, num_layers=3, num_heads=3, d_ff=40)
SWITCHES = [
    dict(zip(("norm", "position", "ffn", "tie_embeddings"), values, strict=True))
    for values in itertools.product(
        ("pre", "post", "none"), ("rope", "sinusoidal", "none"), ("swiglu", "silu"), (False, True)
    )
]
SWITCHES += [
    {"qk_norm": qk_norm, "parallel": parallel, "position": position}
    for qk_norm, parallel, position in itertools.product((False, True), (False, True), ("rope", "none"))
    if qk_norm or parallel
]
GROUPED = [
    {"num_kv_heads": heads, "d_model": 32, "num_heads": 4, "norm_eps": 1e-2, "qk_norm": heads == 2, "attention": name}
    for heads, name in ((1, "plain"), (2, "plain"), (4, "plain"), (1, "sdpa"), (2, "flash"))
]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def ids_of(config: ModelConfig, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def built(config: ModelConfig, seed: int = 0, **place) -> TransformerLM:
    """A model whose gains are not all one, so that a norm which forgets them is noticed."""
    torch.manual_seed(seed)
    model = TransformerLM(config, **place)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("switches", SWITCHES + GROUPED, ids=lambda s: "-".join(map(str, s.values())))
def test_whole_model_equals_the_second_model(switches):
    """Also, no logit depends on a later token, and every parameter gets a gradient."""
    config = replace(TINY, **switches)
    model, token_ids = built(config), ids_of(config, 2, 12)
    logits = model(token_ids)
    expected = reference_logits(config, model.state_dict(), token_ids)
    # without norms the logits grow large, so the tolerance is relative to their size
    torch.testing.assert_close(logits, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
    cross_entropy(logits, ids_of(config, 2, 12, seed=1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    for changed in (5, 11):
        other = token_ids.clone()
        other[:, changed] = (other[:, changed] + 1) % config.vocab_size
        difference = (model(other) - logits).abs().amax(dim=(0, 2))
        assert torch.equal(difference[:changed], torch.zeros(changed))
        assert (difference[changed:] > 0).all()


@torch.no_grad()
def test_whole_model_in_float64_and_bfloat16():
    token_ids = ids_of(TINY, 2, 17)
    double = built(TINY, dtype=torch.float64)
    expected = reference_logits(TINY, double.state_dict(), token_ids)
    assert expected.dtype == torch.float64
    # the tables of cosines and sines are float32, which bounds the agreement
    torch.testing.assert_close(double(token_ids), expected, atol=1e-6, rtol=1e-6)
    for position in ("rope", "sinusoidal", "none"):
        half = built(replace(TINY, position=position), dtype=torch.bfloat16)
        wide = {name: weight.float() for name, weight in half.state_dict().items()}
        expected = reference_logits(half.config, wide, token_ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = half.float()(token_ids)
        for logits in (half.bfloat16()(token_ids), mixed):
            assert logits.dtype == torch.bfloat16
            assert (logits.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("value", [0.0, 60_000.0])
def test_rmsnorm_of_zeros_and_of_values_whose_squares_overflow_in_half_precision(value):
    x = torch.full((1, 8), value, dtype=torch.float16)
    assert torch.equal(RMSNorm(8)(x), x / max(value, 1))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**17), st.integers(0, 3), st.floats(1e2, 1e6))
def test_angles_are_exact_at_far_positions(position, pair, theta):
    """Pair k of position i turns by i / theta^(2k / d), to the precision of float32 cosines, at 131,072 as at 1."""
    rope = RotaryPositionalEmbedding(theta, 8, 2**17 + 1)
    angle = position / theta ** (2 * pair / 8)
    found = rope.cos[position, pair].item(), rope.sin[position, pair].item()
    assert found == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-7)
    angle = position / 10_000 ** (2 * pair / 8)
    found = sinusoidal_positions(position + 1, 8)[position, 2 * pair : 2 * pair + 2].tolist()
    assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-7)


@torch.no_grad()
def test_attention_takes_any_leading_dimensions_and_positions_and_masks_per_sequence():
    rope = RotaryPositionalEmbedding(10_000.0, 4, 64)
    attention = CausalMultiHeadSelfAttention(12, 3, rope)
    x = torch.randn(2, 4, 7, 12)
    torch.testing.assert_close(attention(x)[1, 2], attention(x[1, 2]), **CLOSE)
    positions = torch.stack([torch.arange(7), torch.arange(20, 27), torch.arange(5, 12), torch.arange(7) * 3])
    together = attention(x, positions.expand(2, 4, 7))
    torch.testing.assert_close(together[1, 3], attention(x[1, 3], positions[3]), **CLOSE)
    masks = (torch.rand(2, 4, 7, 7) > 0.5) | torch.eye(7, dtype=torch.bool)  # one for each sequence
    torch.testing.assert_close(attention(x, mask=masks)[1, 2], attention(x[1, 2], mask=masks[1, 2]), **CLOSE)
    assert torch.equal(causal_mask(2, 7), causal_mask(7, 7)[-2:])  # with keys from before the queries
    # a shift of all positions changes nothing: RoPE is relative
    torch.testing.assert_close(together[:, 1], attention(x)[:, 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("std", [None, 1.0, 0.02])
def test_initialization_is_a_normal_distribution_cut_at_three_sigma(std):
    torch.manual_seed(0)
    layer = Linear(300, 500) if std is None else Embedding(1000, 200, std=std)
    z = layer.weight.detach() / (std or math.sqrt(2 / 800))
    assert 2.9 < z.abs().max() <= 3 + 1e-5
    # a normal distribution cut at 3 sigma has standard deviation 0.9866
    assert z.std().item() == pytest.approx(0.98658, abs=0.005)
    assert z.mean().item() == pytest.approx(0, abs=0.01)
    inside_one_sigma = math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2))
    assert (z.abs() < 1).double().mean().item() == pytest.approx(inside_one_sigma, abs=0.005)


@pytest.mark.parametrize(
    ("switches", "std"),
    [({"tie_embeddings": True}, 64**-0.5), ({"embedding_init_std": 0.1}, 0.1), ({}, 1.0)],
)
def test_initialization_of_the_whole_model(switches, std):
    """A seed fixes it. `std` is that of the embedding."""
    config = model_config("smoke", vocab_size=997, **switches)
    for name, parameter in built(config, seed=1).named_parameters():
        assert torch.equal(parameter, built(config, seed=1).get_parameter(name))
    torch.manual_seed(0)
    for name, parameter in TransformerLM(config).named_parameters():
        if "ln" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        expected = std if name.startswith("token_embeddings") else math.sqrt(2 / sum(parameter.shape))
        assert parameter.std().item() == pytest.approx(0.98658 * expected, rel=0.05), name
        assert not torch.equal(parameter, built(config, seed=1).get_parameter(name))


def test_what_is_shared_and_what_is_in_the_state_dict():
    model = built(replace(TINY, tie_embeddings=True))
    assert model.lm_head.weight is model.token_embeddings.weight
    assert len(list(model.parameters())) == len(list(built(TINY).parameters())) - 1
    assert len({id(layer.attn.rope) for layer in model.layers}) == 1
    assert not [name for name in model.state_dict() if "rope" in name or "cos" in name]
    other, token_ids = built(replace(TINY, tie_embeddings=True), seed=7), ids_of(TINY, 1, 6)
    other.load_state_dict(model.state_dict())
    for same in (other, copy.deepcopy(model)):
        assert same.lm_head.weight is same.token_embeddings.weight
        assert torch.equal(same(token_ids), model(token_ids))
    model(token_ids).sum().backward()
    untouched = ~torch.isin(torch.arange(TINY.vocab_size), token_ids)
    assert (model.token_embeddings.weight.grad[untouched] != 0).any()  # the output layer's share


def test_dropout_is_on_in_training_and_off_in_evaluation():
    model, token_ids = built(replace(TINY, dropout=0.5)), ids_of(TINY, 2, 12)
    assert not torch.equal(model(token_ids), model(token_ids))
    assert torch.equal(model.eval()(token_ids), built(TINY)(token_ids))


def test_bad_input_gets_one_sentence():
    for call, sentence in (
        (lambda: CausalMultiHeadSelfAttention(10, 3), r"d_model \(10\) must be divisible by num_heads \(3\)\.$"),
        (lambda: RotaryPositionalEmbedding(1e4, 5, 8), r"RoPE rotates pairs, so the head size must be even, not 5\.$"),
        (lambda: built(TINY)(torch.tensor([[0, 61]])), r"Token ids must be from 0 to 60; the input holds 61\.$"),
        (lambda: built(TINY)(torch.tensor([[0, -1]])), r"Token ids must be from 0 to 60; the input holds -1\.$"),
        (lambda: built(TINY)(ids_of(TINY, 1, 25)), r"The input has 25 positions; context_length is 24\.$"),
    ):
        with pytest.raises(UserError, match=sentence):
            call()
