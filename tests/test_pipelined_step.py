"""Fused steps that take their update with the next call: the same weights, whatever comes in between."""

import copy
import math

import pytest
import torch
from fused_models import SHAPES, batch_of, fused_step, model_of

from lmcore.checkpoint import digest
from lmcore.errors import UserError
from lmcore.fused.step import leaves_room
from lmcore.workbook.inspection import norms_by_layer


def test_a_batch_that_fails_leaves_the_update_taken_once():
    """Also a pipelined step on a CPU: an id outside of the vocabulary, after a good step."""
    config = SHAPES["odd"]
    models = [model_of(config) for _ in range(2)]
    steps = [fused_step(model, 2, pipelined=True) for model in models]
    inputs, targets = batch_of(config)
    for step in steps:
        step(inputs, targets)
    with pytest.raises((IndexError, RuntimeError)):
        steps[0](torch.full_like(inputs, config.vocab_size), targets)
    for step in steps:
        step.current()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    with pytest.raises(UserError, match=r"not \(2, 1\)"):
        steps[0](inputs, targets[:, :1])


def test_an_update_that_is_due_is_dropped_with_the_weights_it_was_for():
    config = SHAPES["odd"]
    model = model_of(config)
    step = fused_step(model, 2, pipelined=True)
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    step(*batch_of(config))
    model.load_state_dict(loaded)
    step.current()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, step.transformer.copies, step.transformer.copies.values()))


def test_only_fused_adamw_is_pipelined():
    with pytest.raises(UserError, match="needs FusedAdamW; Muon takes its own step"):
        fused_step(model_of(SHAPES["tied"]), 2, name="muon", pipelined=True)
    assert not fused_step(model_of(SHAPES["tied"]), 2, name="muon").pipelined


@pytest.mark.parametrize("pipelined", [False, True])
def test_training_goes_on_from_what_was_loaded_after_a_step_that_was_not_finite(device, pipelined):
    """Weights and state of before put back: the same batches give the same results, although a graph is captured."""
    config = SHAPES["odd"]
    model = model_of(config, device)
    step = fused_step(model, 2, pipelined=pipelined)
    batches = [batch_of(config, device=device) for _ in range(4)]
    for batch in batches[:2]:
        step(*batch)
    step.current()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(step.optimizer.state_dict())
    expected = [torch.stack(step(*batch)) for batch in batches[2:]]
    with torch.no_grad():
        model.layers[1].ffn.w2.weight[0, 0] = math.inf
    assert not torch.stack(step(*batches[0])).isfinite().any()
    model.load_state_dict(weights)
    step.optimizer.load_state_dict(state)
    for batch, result in zip(batches[2:], expected, strict=True):
        torch.testing.assert_close(torch.stack(step(*batch)), result, rtol=1e-6, atol=0)
    step.current()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["odd", "tied"])
def test_updating_beside_the_next_forward_pass_changes_nothing(name, device):
    """Losses, norms, weights and the optimizer's state are those of steps that end with their update, bit by bit."""
    config = SHAPES[name]
    models = [model_of(config, device) for _ in range(2)]
    steps = [fused_step(model, 2, limit=0.5, pipelined=flag) for model, flag in zip(models, (True, False), strict=True)]
    batches = [batch_of(config, device=device) for _ in range(6)]
    for number, batch in enumerate(batches):
        results = []
        for step in steps:
            for group in step.optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + number % 3)
            results.append(torch.stack(step(*batch)))
        assert torch.equal(*results)
        if number in (0, 3):  # as for an evaluation; twice is no different
            for _ in range(2):
                steps[0].current()
            assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    steps[0].current()
    states = [digest(step.optimizer.state_dict()) for step in steps]
    assert states[0] == states[1]
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


def test_current_weights_are_those_of_the_last_step_wherever_they_are_read():
    """In the middle of training, for an evaluation, and for a look inside: a pipelined step against one that is not."""
    config = SHAPES["odd"]
    steps = [fused_step(model_of(config), 2, limit=0.5, pipelined=flag) for flag in (True, False)]
    inputs, targets = batch_of(config)
    for _ in range(3):
        for step in steps:
            step(inputs, targets, lr=1e-2)
        assert steps[0].due
        assert not steps[1].due
        losses = [step.evaluation_loss(inputs, targets).item() for step in steps]
        assert losses[0] == losses[1]
        for step in steps:
            step(inputs, targets, lr=1e-2)
        inside = [norms_by_layer(step.current()[0], inputs, targets) for step in steps]
        assert inside[0].equals(inside[1])


def test_the_update_goes_beside_the_forward_pass_of_small_batches_of_narrow_models():
    cuda = torch.device("cuda")
    assert leaves_room(cuda, 1024, 768)
    assert leaves_room(cuda, 2048, 512)
    assert not leaves_room(cuda, 2049, 512)
    assert not leaves_room(cuda, 1024, 2560)
    assert not leaves_room(torch.device("cpu"), 1024, 768)
