"""Optimizers, schedule and clipping against PyTorch's own and transcriptions of the handout's algorithms."""

import math

import pytest
import torch
from adapters import DecayFirst, get_adamw_cls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lmcore.config import OptimizerConfig, model_config
from lmcore.model import TransformerLM
from lmcore.optimizer import (
    SGD,
    AdamW,
    Muon,
    build_optimizer,
    get_lr_cosine_schedule,
    gradient_clipping,
    gradient_norm,
    orthogonalize,
    set_learning_rate,
)


def problem(seed: int, dtype=torch.float32):
    """Two parameters and a loss that is not quadratic in them; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    a, b, x, y = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(4, 3), (2, 4), (3, 16), (2, 16)]
    )
    parameters = [nn.Parameter(a), nn.Parameter(b)]

    def loss() -> torch.Tensor:
        return (parameters[1] @ torch.tanh(parameters[0] @ x) - y).square().mean()

    return parameters, loss


def train(optimizer: torch.optim.Optimizer, loss, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_the_handouts_toy_follows_its_closed_form():
    """With loss mean(w^2) each step multiplies w by 1 - (2 / size) lr / sqrt(t + 1) (section 4.2)."""
    for lr in (1.0, 1e1, 1e2, 1e3):
        torch.manual_seed(0)
        weights = nn.Parameter(5 * torch.randn(10, 10))
        optimizer = SGD([weights], lr=lr)
        start = weights.detach().square().mean().item()
        losses = train(optimizer, lambda weights=weights: (weights**2).mean(), 10)
        factors = [1 - 2 / 100 * lr / math.sqrt(t + 1) for t in range(9)]
        expected = [start * math.prod(factors[:t]) ** 2 for t in range(10)]
        assert losses == pytest.approx(expected, rel=1e-3, abs=1e-12)


def test_the_adapter_takes_its_courses_order(tmp_path):
    assert get_adamw_cls(tmp_path) is AdamW
    for log, kind in (
        ("## [26.0.1] 2026-04-05\n\n- handout: a fix\n\n## [1.0.6] - 2025-09-10\n", DecayFirst),
        ("## [1.0.6] - 2025-09-10\n- nothing of 2026\n", AdamW),
    ):
        (tmp_path / "CHANGELOG.md").write_text(log)
        assert get_adamw_cls(tmp_path) is kind


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_adamw_without_decay_and_decay_first_are_pytorchs(betas):
    """Algorithm 1 adds eps before the correction of the bias; with eps 0 the two are the same."""
    settings_ = {"lr": 1e-2, "betas": betas, "eps": 0.0}
    for kind, decay in ((AdamW, 0.0), (DecayFirst, 0.5)):
        (ours, loss), (theirs, their_loss) = problem(0, torch.float64), problem(0, torch.float64)
        train(kind(ours, **settings_, weight_decay=decay), loss, 50)
        train(torch.optim.AdamW(theirs, **settings_, weight_decay=decay), their_loss, 50)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, atol=1e-12, rtol=0)


def test_adamw_with_decay_is_algorithm_1():
    (parameters, loss), (expected, _) = problem(1, torch.float64), problem(1, torch.float64)
    lr, (beta1, beta2), eps, decay = 1e-2, (0.9, 0.95), 1e-2, 0.3  # a large eps, so that its place shows
    optimizer = AdamW(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for t in range(1, 31):
        train(optimizer, loss, 1)
        for n, p in enumerate(parameters):
            (m, v), g, theta = moments[n], p.grad, expected[n].data
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            lr_t = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
            theta = theta - lr_t * m / (torch.sqrt(v) + eps)
            theta = theta - lr * decay * theta
            moments[n], expected[n].data = (m, v), theta
            torch.testing.assert_close(p.data, theta, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", [SGD, AdamW, Muon])
def test_a_step_calls_its_closure_and_leaves_parameters_without_gradient_alone(kind):
    parameters, loss = problem(4)
    unused = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([*parameters, unused], lr=1e-2)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    first = optimizer.step(closure)
    assert first == pytest.approx(problem(4)[1]().item())
    assert optimizer.step(closure) < first
    assert torch.equal(unused, torch.ones(2, 2))


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (3, 24, 40)])
def test_orthogonalize_brings_singular_values_near_one_and_keeps_the_vectors(shape):
    """The result is U f(S) V^T: it has the polar factor's directions, only its lengths are rough."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices, iterations=10))
    assert 0.6 < values.min() <= values.max() < 1.25
    U, _, Vt = torch.linalg.svd(matrices, full_matrices=False)
    core = U.mT @ orthogonalize(matrices) @ Vt.mT
    torch.testing.assert_close(core, torch.diag_embed(core.diagonal(dim1=-2, dim2=-1)), atol=1e-9, rtol=0)
    torch.testing.assert_close(orthogonalize(1e3 * matrices), orthogonalize(matrices), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_decays_weights_and_takes_an_orthogonal_step_of_nesterov_momentum(shape):
    weight, expected, buffer = nn.Parameter(torch.ones(shape)), torch.ones(shape), torch.zeros(shape)
    optimizer = Muon([{"params": [weight], "orthogonalize": True}], lr=0.1, weight_decay=0.5, momentum=0.9)
    for seed in range(3):
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        buffer = 0.9 * buffer + 0.1 * weight.grad
        expected *= 1 - 0.1 * 0.5
        expected -= 0.1 * 0.2 * math.sqrt(6) * orthogonalize(0.1 * weight.grad + 0.9 * buffer)
        optimizer.step()
        torch.testing.assert_close(weight.data, expected, atol=1e-5, rtol=1e-4)


def test_muon_groups_without_orthogonalization_are_adamw():
    ours, loss = problem(8)
    theirs, their_loss = problem(8)
    settings_ = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    train(Muon(ours, **settings_), loss, 10)
    train(AdamW(theirs, **settings_), their_loss, 10)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("switches", [{}, {"tie_embeddings": True}])
def test_build_optimizer_holds_every_parameter_once_and_muon_orthogonalizes_the_hidden_matrices(name, switches):
    model = TransformerLM(model_config("smoke", vocab_size=50, **switches))
    optimizer = build_optimizer(model, OptimizerConfig(name=name, learning_rate=2e-3))
    assert {group["lr"] for group in optimizer.param_groups} == {2e-3}
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    for path, p in model.named_parameters():
        hidden = name == "muon" and p.ndim == 2 and ("attn" in path or "ffn" in path)
        assert group_of[id(p)].get("orthogonalize", False) == hidden


META = TransformerLM(model_config("smoke", vocab_size=50), device="meta")


@pytest.mark.parametrize("name", ["adamw", "muon"])
@given(st.floats(0, 1), st.floats(0, 0.99), st.floats(0, 0.999), st.floats(1e-12, 1e-3), st.floats(0, 1), st.booleans())
@settings(max_examples=10, deadline=None)
def test_every_group_has_the_configured_settings_and_follows_the_schedule(name, rate, beta1, beta2, eps, decay, norms):
    config = OptimizerConfig(
        name=name, learning_rate=1e-3, min_learning_rate=0.0, betas=(beta1, beta2), eps=eps, weight_decay=decay,
        decay_norms=norms,
    )  # fmt: skip
    optimizer = build_optimizer(META, config)
    set_learning_rate(optimizer, rate)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (rate, (beta1, beta2), eps)
        decays = norms or group["params"][0].ndim == 2
        assert group["weight_decay"] == (decay if decays else 0)


def test_schedule_at_its_boundaries():
    half = 0.1 + 0.45 * (1 + math.sqrt(0.5))
    expected = {0: 0, 5: 0.5, 9: 0.9, 10: 1, 15: half, 20: 0.55, 30: 0.1, 31: 0.1, 999: 0.1}
    rates = {it: get_lr_cosine_schedule(it, 1.0, 0.1, warmup_iters=10, cosine_cycle_iters=30) for it in expected}
    assert rates == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4), st.floats(1e-3, 1e3))
def test_clipping_is_pytorchs(shapes, max_norm):
    generator = torch.Generator().manual_seed(len(shapes))
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
    torch.testing.assert_close(gradient_clipping(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert gradient_norm([p.grad for p in ours]) <= max_norm * (1 + 1e-5)
