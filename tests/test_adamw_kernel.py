"""The fused AdamW and Muon, plain and in Triton, against the plain class and the formula in float64."""

import copy
import importlib.util
import math

import pytest
import torch
from torch import nn

from lmcore.errors import UserError
from lmcore.fast.kernels.adamw import FusedAdamW
from lmcore.fast.muon import FusedMuon
from lmcore.optimizer import AdamW, Muon, gradient_clipping

SHAPES = [(1,), (5,), (1023,), (2049,), (20, 16), (0, 3)]


@pytest.fixture(autouse=True)
def short_programs(device, monkeypatch):
    """A program of the norm goes through two blocks where Triton's interpreter runs it, not through sixteen."""
    if device.type == "cpu" and importlib.util.find_spec("triton"):
        monkeypatch.setattr("lmcore.fast.kernels.adamw.gpu.PARTS", 2)


def parameters(device, shapes=SHAPES, seed=0, dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def gradients(shapes, step: int) -> list[torch.Tensor]:
    """Fresh gradients whose sizes differ widely between parameters, exact in bfloat16."""
    generator = torch.Generator().manual_seed(1000 + step)
    values = [torch.randn(shape, generator=generator) * 10.0 ** (-2 * i) for i, shape in enumerate(shapes)]
    return [value.bfloat16().float() for value in values]


def give(step: int, *lists: list[nn.Parameter]) -> None:
    """The gradients of a step to each of the lists of parameters."""
    for parameters in lists:
        for p, gradient in zip(parameters, gradients([p.shape for p in parameters], step), strict=True):
            p.grad = gradient.to(p.device, p.dtype)


def equal(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def distance(ours, theirs) -> float:
    """Relative l2 distance of two lists of tensors."""
    a, b = (torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in (ours, theirs))
    return ((a - b).norm() / b.norm()).item()


def moments(optimizer) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("m", "v")]


def groups_of(parameters):
    """Three groups with settings of their own."""
    return [
        {"params": parameters[:2]},
        {"params": parameters[2:4], "lr": 1e-2, "weight_decay": 0.0},
        {"params": parameters[4:], "betas": (0.5, 0.99), "eps": 1e-3},
    ]


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_many_steps_follow_the_formula_in_float64(device, kernels, max_norm):
    ours, plain, exact = (parameters(device, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64))
    optimizer = FusedAdamW(groups_of(ours), lr=1e-3, weight_decay=0.1, max_grad_norm=max_norm)
    others = [AdamW(groups_of(p), lr=1e-3, weight_decay=0.1) for p in (plain, exact)]
    optimizer.step()  # of parameters that have no gradient yet
    assert not optimizer.state
    for step in range(12):
        give(step, ours, plain, exact)
        for p in (ours, plain, exact):
            p[step % 4].grad = None  # skipped until there is one
        before = [p.grad.clone() for p in ours if p.grad is not None]
        if max_norm is not None:
            norms = [gradient_clipping(p, max_norm) for p in (plain, exact)]
        for o in (optimizer, *others):
            for group in o.param_groups:
                group["lr"] *= 0.99  # as a schedule would
            o.step()
        if max_norm is not None:
            assert optimizer.norm.item() == pytest.approx(norms[1].item(), rel=1e-5)
        assert equal((p.grad for p in ours if p.grad is not None), before), "clipping leaves the gradients as they are"
    assert distance(ours, exact) < 1e-6
    mine, wanted = [optimizer.state[p] for p in ours], [others[1].state[p] for p in exact]
    assert [state["t"] for state in mine] == [state["t"] for state in wanted]
    assert distance(*([state[name] for state in of for name in ("m", "v")] for of in (mine, wanted))) < 1e-5
    if kernels == "plain":
        assert equal(ours, plain)


def packed(dtype, device, gap: int) -> list[torch.Tensor]:
    """Contiguous views that begin `gap` elements behind a buffer's start: with an odd gap they are not aligned."""
    buffers = [torch.zeros(gap + math.prod(shape), dtype=dtype, device=device) for shape in SHAPES]
    return [buffer[gap:].view(shape) for buffer, shape in zip(buffers, SHAPES, strict=True)]


@pytest.mark.parametrize(
    ("gap", "gradient_type", "copy_type"),
    [(1, torch.bfloat16, torch.float32), (64, torch.float32, torch.bfloat16)],
)
def test_bound_gradients_and_working_copies_in_packed_buffers(device, kernels, gap, gradient_type, copy_type):
    ours, plain = parameters(device), parameters(device)
    optimizer, reference = FusedAdamW(ours, lr=1e-2, max_grad_norm=1.0), AdamW(plain, lr=1e-2)
    read, written = packed(gradient_type, device, gap), packed(copy_type, device, gap)
    # the first parameter keeps p.grad and the last but one has no copy: kinds are mixed
    optimizer.bind(dict(zip(ours[1:], read[1:], strict=True)), dict(zip(ours[:4], written[:4], strict=True)))
    for step in range(3):
        give(step, plain)
        for view, p in zip(read, plain, strict=True):
            view.copy_(p.grad)
        ours[0].grad = plain[0].grad.clone()
        gradient_clipping(plain, 1.0)
        optimizer.step()
        reference.step()
    assert distance(ours, plain) < 1e-6
    for p, c in zip(ours[:4], written[:4], strict=True):
        if kernels == "triton" and device.type == "cpu":  # the interpreter cuts digits off instead of rounding
            torch.testing.assert_close(c.float(), p.detach(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(c, p.detach().to(copy_type))
    assert not any(c.any() for c in written[4:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_does_what_it_does_to_the_plain_class(device, kernels, bad, max_norm):
    ours, plain = parameters(device, [(5,), (20,)]), parameters(device, [(5,), (20,)])
    optimizer, reference = FusedAdamW(ours, max_grad_norm=max_norm), AdamW(plain)
    give(0, ours, plain)
    for p in (ours, plain):
        p[0].grad[3] = bad
    if max_norm is not None:
        gradient_clipping(plain, max_norm)
    optimizer.step()
    reference.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert not torch.isfinite(ours[0]).all()
    assert math.isnan(optimizer.norm.item()) if max_norm is None else not math.isfinite(optimizer.norm.item())


def test_states_go_from_one_class_to_the_other_and_keep_their_addresses(device, kernels):
    """Into new objects and into those in use, whose moments a graph may hold; a state of no step makes them zero."""
    ours, plain = parameters(device), parameters(device)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = FusedAdamW(groups_of(ours), **settings), AdamW(groups_of(plain), **settings)
    fresh = copy.deepcopy(optimizers[0].state_dict())
    for step in range(4):
        give(step, ours, plain)
        for o in optimizers:
            o.step()
        states, used = [copy.deepcopy(o.state_dict()) for o in optimizers], moments(optimizers[0])
        if step == 1:  # into new ones
            optimizers = FusedAdamW(groups_of(ours), **settings), AdamW(groups_of(plain), **settings)
        for o, state in zip(optimizers, reversed(states), strict=True):
            o.load_state_dict(state)
        assert step == 1 or all(a is b for a, b in zip(moments(optimizers[0]), used, strict=True))
    assert distance(ours, plain) < 1e-6
    mine, theirs = (o.state_dict() for o in optimizers)
    assert mine["param_groups"] == theirs["param_groups"]
    for state in (mine, theirs):
        assert [(s["t"], set(s)) for s in state["state"].values()] == [(4, {"t", "m", "v"})] * len(SHAPES)
    used = moments(optimizers[0])
    optimizers[0].load_state_dict(fresh)
    assert not optimizers[0].state
    assert not any(m.any() for m in used)
    optimizers[0].step()
    assert all(a is b for a, b in zip(moments(optimizers[0]), used, strict=True))


@pytest.mark.parametrize(("bad", "max_norm"), [(math.nan, None), (math.inf, 0.5)])
def test_warming_up_changes_nothing(device, kernels, bad, max_norm):
    """Whatever the gradients are; the next step is as if it had not been."""
    ours, theirs = parameters(device), parameters(device)
    optimizer, reference = (FusedAdamW(groups_of(p), lr=1e-2, max_grad_norm=max_norm) for p in (ours, theirs))
    read, written, others = ([torch.zeros_like(p, dtype=torch.bfloat16) for p in ours] for _ in range(3))
    optimizer.bind(*(dict(zip(ours, values, strict=True)) for values in (read, written)))
    reference.bind(*(dict(zip(theirs, values, strict=True)) for values in (read, others)))
    start = [p.detach().clone() for p in ours]
    optimizer.warm_up()
    assert equal(ours, start)
    assert not optimizer.state
    for step in range(2):
        for view, gradient in zip(read, gradients(SHAPES, step), strict=True):
            view.copy_(gradient)
        optimizer.step()
        reference.step()
        before = [x.detach().clone() for x in (*ours, *written, *moments(optimizer), optimizer.norm)]
        for view in read:
            view.fill_(bad)
        optimizer.warm_up()
        optimizer.norm.copy_(before[-1])
        after = (*ours, *written, *moments(optimizer), optimizer.norm)
        for x, y in zip(after, before, strict=True):
            torch.testing.assert_close(x.detach(), y, rtol=0, atol=0, equal_nan=True)
    assert equal(ours, theirs)
    assert {s["t"] for s in optimizer.state.values()} == {2}


def test_what_it_cannot_update_is_refused(device, kernels):
    ours = parameters(device, [(4, 6)])
    optimizer, zeros, before = FusedAdamW(ours), torch.zeros(6, 4, device=device), ours[0].detach().clone()
    for call in (
        lambda: FusedAdamW(parameters(device, dtype=torch.bfloat16)),
        lambda: FusedAdamW(parameters(device), max_grad_norm=0.0),
        optimizer.launch,  # without prepare
        lambda: optimizer.bind({ours[0]: zeros}, {}),
        lambda: optimizer.bind({ours[0]: zeros.view(4, 6).half()}, {}),
        lambda: optimizer.bind({}, {ours[0]: zeros.t()}),
    ):
        with pytest.raises(UserError):
            call()
    ours[0].grad = zeros.t()
    with pytest.raises(UserError):
        optimizer.step()
    assert torch.equal(ours[0], before)
    assert not optimizer.state


def test_muon_by_kernels_is_the_plain_muon(device, kernels):
    """Matrices of two shapes and a vector, clipped; the compute weights follow, and warming up does nothing."""
    shapes = [(7, 5), (5, 33), (7, 5), (3,)]
    ours, plain = parameters(device, shapes), parameters(device, shapes)
    groups = [[{"params": ps[:3], "orthogonalize": True}, {"params": ps[3:]}] for ps in (ours, plain)]
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    fused, muon = FusedMuon(groups[0], max_grad_norm=0.5, **settings), Muon(groups[1], **settings)
    copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in ours}
    fused.bind({}, copies)
    for step in range(4):
        give(step, ours, plain)
        before = [p.detach().clone() for p in ours]
        kept = [fused.state[p]["momentum_buffer"].clone() for p in ours[:3] if fused.state[p]]
        ours[0].grad, finite = ours[0].grad * math.inf, ours[0].grad
        fused.warm_up()
        ours[0].grad = finite
        assert equal(ours, before)
        assert equal([fused.state[p]["momentum_buffer"] for p in ours[:3] if fused.state[p]], kept)
        gradient_clipping(plain, 0.5)
        fused.step()
        muon.step()
    assert distance(ours, plain) < (1e-6 if device.type == "cpu" else 1e-3)
    buffers = [
        [optimizer.state[p]["momentum_buffer"] for p in ps[:3]] for optimizer, ps in ((fused, ours), (muon, plain))
    ]
    assert distance(*buffers) < 1e-6
    for p, weight in copies.items():  # the interpreter rounds toward zero
        torch.testing.assert_close(weight.float(), p.detach(), rtol=2**-7, atol=0)
