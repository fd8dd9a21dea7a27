"""Drawing the next token against the definition: temperature, the truncated distribution, and the draw itself."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmcore.config import GenerateConfig
from lmcore.errors import UserError
from lmcore.sampling import draw, next_token_distribution, sample_next


def brute_force(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> dict[int, float]:
    """The definition, in plain Python: a dictionary of the tokens that are left."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return {order[0]: 1.0}
    weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in order[:top_k]}
    q = {i: w / sum(weights.values()) for i, w in weights.items()}
    if top_p < 1:
        nucleus, reached = {}, 0.0
        for i in order[:top_k]:
            nucleus[i] = q[i]
            reached += q[i]
            assume(abs(reached - top_p) > 1e-9)  # at equality the two sums may round to different sides
            if reached >= top_p:
                break
        q = {i: w / sum(nucleus.values()) for i, w in nucleus.items()}
    return {i: w for i, w in q.items() if w > 0}


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.sampled_from([-30.0, -2.0, -0.5, 0.0, 0.1, 1.0, 1.5, 7.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5, 1e30]),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
)
def test_distribution_is_the_definition(logits, temperature, top_k, top_p):
    config = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    q, ids = next_token_distribution(torch.tensor([logits], dtype=torch.float64), config)
    expected = brute_force(logits, temperature, top_k, top_p)
    found = {i: p for i, p in zip(ids[0].tolist(), q[0].tolist(), strict=True) if p > 0}
    assert found == pytest.approx(expected, rel=1e-9)
    assert sorted(ids[0].tolist()) == list(range(len(logits)))
    assert (q[0].diff() <= 0).all()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, 2), (0.500001, 3), (0.25, 1), (1e-9, 1), (0.75, 3), (0.999, 4), (1.0, 4)]
)
def test_nucleus_is_the_smallest_set_that_reaches_p(top_p, kept):
    q, ids = next_token_distribution(torch.zeros(1, 4), GenerateConfig(top_p=top_p))
    assert (q > 0).sum() == kept
    assert ids[0, :kept].tolist() == list(range(kept))
    assert q[0, :kept].tolist() == pytest.approx([1 / kept] * kept)


def test_rows_and_half_precision_are_treated_alike():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    config = GenerateConfig(temperature=0.7, top_p=0.8, top_k=20)
    q, ids = next_token_distribution(logits, config)
    alone = [next_token_distribution(row[None].float(), config) for row in logits]
    assert torch.equal(q, torch.cat([one[0] for one in alone]))
    assert torch.equal(ids, torch.cat([one[1] for one in alone]))


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"temperature": 1.5, "top_k": 4}, {"top_p": 0.7}], ids=str)
def test_samples_follow_the_distribution(options):
    config = GenerateConfig(**options)
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.2, 0.0, 1.9]])
    draws = 20_000
    ids = sample_next(logits.expand(draws, -1), config, [torch.Generator().manual_seed(7)] * draws)
    counts = torch.bincount(ids, minlength=6).double()
    q, order = next_token_distribution(logits, config)
    expected = torch.zeros(6).scatter(0, order[0], q[0]).double() * draws
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum().item()
    # 5 degrees of freedom or fewer: exceeded by one correct sampler in 7,000 (the seed is fixed)
    assert chi_square < 25


def test_a_cumulative_sum_that_ends_below_one_picks_the_last_token_that_was_kept():
    """Where the sum is rounded down, the largest random number lies above all of it."""
    u, config, below = torch.tensor([1 - 2**-24]), GenerateConfig(top_p=0.9), 0
    for seed in range(30):
        logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed))
        q, ids = next_token_distribution(logits, config)
        below += int(q.cumsum(dim=-1)[0, -1] <= u)
        assert draw(logits, config, u) == ids[0, (q > 0).sum() - 1]
    assert below, "no sum was rounded down: try more seeds"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value):
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="NaN or infinity"):
            sample_next(torch.tensor([[0.0, value]]), GenerateConfig(temperature=temperature), [torch.Generator()])
