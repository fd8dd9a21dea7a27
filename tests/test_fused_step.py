"""The explicit training step against the plain model with autograd: losses, gradients, whole runs."""

import math
import re
from dataclasses import asdict

import pytest
import torch
from fused_models import SHAPES, batch_of, fused_step, model_of, plain_step, relative_error
from torch import Tensor

from lmcore.config import ModelConfig
from lmcore.errors import UserError
from lmcore.functional import cross_entropy
from lmcore.fused.coverage import why_not
from lmcore.fused.model import FusedTransformer
from lmcore.fused.step import FusedStep
from lmcore.kernels.common.support import has_triton


@pytest.mark.parametrize("layers_per_product", [None, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_are_those_of_autograd(name, layers_per_product):
    config = SHAPES[name]
    model = model_of(config)
    inputs, targets = batch_of(config)
    expected = cross_entropy(model(inputs), targets)
    expected.backward()
    fused = FusedTransformer(model, torch.float32, layers_per_product=layers_per_product)
    assert fused.loss(inputs, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    for _ in range(2):  # the second time over the gradients of the first
        loss = fused.forward_backward(inputs, targets)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert set(fused.gradients) == set(model.parameters())
        for path, p in model.named_parameters():
            assert relative_error(fused.gradients[p], p.grad) < 1e-5, path


def test_shorter_batches_than_the_context():
    config = SHAPES["odd"]
    model = model_of(config)
    inputs, targets = (x[:1, :6] for x in batch_of(config))
    fused = FusedTransformer(model, torch.float32)
    expected = cross_entropy(model(inputs), targets).item()
    assert fused.loss(inputs, targets).item() == pytest.approx(expected, rel=1e-6)
    assert fused.forward_backward(inputs, targets).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_the_step_over_triton_kernels(monkeypatch, device):
    """The elementwise kernels in their places, by the interpreter where there is no GPU."""
    for name in ("rmsnorm", "rope", "swiglu", "embedding"):
        monkeypatch.setattr(f"lmcore.kernels.{name}.runs_triton", lambda device: True)
    config = SHAPES["odd"]
    model = model_of(config, device)
    inputs, targets = batch_of(config, device=device)
    cross_entropy(model(inputs), targets).backward()
    fused = FusedTransformer(model, torch.float32)
    fused.forward_backward(inputs, targets)
    for path, p in model.named_parameters():
        assert relative_error(fused.gradients[p], p.grad) < 1e-5, path


@pytest.mark.parametrize("name", ["odd", "tied"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_training_is_that_of_the_plain_step(name, optimizer):
    """30 steps in float32, clipped and with changing learning rates: losses and norms within 1e-5, weights too."""
    config = SHAPES[name]
    plain, fused = model_of(config), model_of(config)
    steps = plain_step(plain, name=optimizer, limit=0.5), fused_step(fused, 2, limit=0.5, name=optimizer)
    for number in range(30):
        inputs, targets = batch_of(config)
        results = []
        for step in steps:
            for group in step.optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + number % 3)
            results.append([value.item() for value in step(inputs, targets)])
        assert results[1] == pytest.approx(results[0], rel=1e-5)
    steps[1].current()
    for (path, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert relative_error(q, p) < 1e-5, path
    expected = plain_step(plain).evaluation_loss(inputs, targets).item()
    assert steps[1].transformer.loss(inputs, targets).item() == pytest.approx(expected, rel=1e-5)


def test_working_copies_follow_the_masters():
    """bfloat16 copies are the rounded masters after a step and after a write; the state dict is current."""
    config = SHAPES["odd"]
    model = model_of(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = fused_step(model, 2, torch.bfloat16)
    step(*batch_of(config))
    step.current()
    assert all((value != before[name]).any() for name, value in model.state_dict().items())
    assert all(torch.equal(copy, p.bfloat16()) for p, copy in step.transformer.copies.items())
    model.load_state_dict(before)
    step.current()
    assert all(torch.equal(copy, p.bfloat16()) for p, copy in step.transformer.copies.items())
    assert step.transformer.weights.head[config.vocab_size :].count_nonzero() == 0


def test_half_precision_is_near(device):
    config = SHAPES["odd"]
    model = model_of(config, device)
    inputs, targets = batch_of(config, device=device)
    expected = cross_entropy(model(inputs), targets)
    expected.backward()
    fused = FusedTransformer(model, torch.bfloat16)
    assert fused.forward_backward(inputs, targets).item() == pytest.approx(expected.item(), rel=5e-3)
    for path, p in model.named_parameters():
        assert relative_error(fused.gradients[p], p.grad) < 4e-2, path


UNCOVERED = [
    ({"norm": "post"}, "norm=post"),
    ({"norm": "none"}, "norm=none"),
    ({"position": "sinusoidal"}, "position=sinusoidal"),
    ({"ffn": "silu"}, "ffn=silu"),
    ({"dropout": 0.1}, "dropout=0.1"),
    ({"checkpoint_every": 2}, "checkpoint_every=2"),
    ({"d_model": 3 * 130}, "heads of 130 features (at most 128)"),
    ({"norm": "post", "dropout": 0.5}, "norm=post, dropout=0.5"),
]


@pytest.mark.parametrize(("changes", "reason"), UNCOVERED, ids=[reason for _, reason in UNCOVERED])
def test_a_model_that_is_not_covered_is_refused(changes, reason):
    """Or it would be computed as another one."""
    config = ModelConfig(**asdict(SHAPES["odd"]) | changes)
    assert why_not(config, "bf16") == reason
    sentence = re.escape(f"The fused step does not cover {reason}.")
    for make in (lambda model: FusedTransformer(model, torch.float32), lambda model: fused_step(model, 2)):
        with pytest.raises(UserError, match=f"^{sentence}$"):
            make(model_of(config))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.float64, "float64")])
def test_a_precision_that_is_not_covered_is_refused(dtype, name):
    for precision in ("bf16", "fp32", "tf32"):
        assert why_not(SHAPES["odd"], precision) is None
    assert why_not(SHAPES["odd"], name) == f"precision={name}"
    with pytest.raises(UserError, match=f"^The fused step does not cover precision={name}.$"):
        FusedTransformer(model_of(SHAPES["odd"]), dtype)


def test_an_empty_batch_is_refused_before_anything_is_made():
    model = model_of(SHAPES["odd"])
    with pytest.raises(UserError, match="at least one id; batch_size is 0 and context_length 13"):
        fused_step(model, 0)
    with pytest.raises(UserError, match="batch_size is 2 and context_length 0"):
        FusedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, 0)
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_of_another_shape_is_refused():
    step = fused_step(model_of(SHAPES["odd"]), 2)
    inputs, targets = batch_of(SHAPES["odd"], size=3)
    with pytest.raises(UserError, match=r"batches of \(2, 13\) ids, not \(3, 13\)"):
        step(inputs, targets)


def test_too_long_a_batch_is_refused():
    fused = FusedTransformer(model_of(SHAPES["odd"]), torch.float32)
    ids = torch.zeros(1, 14, dtype=torch.int64)
    for function in (fused.loss, fused.forward_backward):
        with pytest.raises(UserError, match="14 positions; context_length is 13"):
            function(ids, ids)


def test_what_is_not_finite_shows():
    model = model_of(SHAPES["odd"])
    with torch.no_grad():
        model.layers[1].ffn.w2.weight[0, 0] = math.inf
    loss, norm = fused_step(model, 2)(*batch_of(SHAPES["odd"]))
    assert not loss.isfinite()
    assert not norm.isfinite()


def test_results_of_a_step_outlive_the_next(device):
    config = SHAPES["odd"]
    step = fused_step(model_of(config, device), 2)
    first = step(*batch_of(config, device=device))
    values = [value.item() for value in first]
    step(*batch_of(config, device=device))
    assert [value.item() for value in first] == values


GPU_MODEL = ModelConfig(1000, context_length=128, d_model=256, num_layers=4, num_heads=8, d_ff=704)


def repeated_text(config: ModelConfig, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Windows of a tiny corpus that a model can learn by heart."""
    corpus = torch.randint(config.vocab_size, (1024,), generator=torch.Generator().manual_seed(1))
    starts = torch.randint(len(corpus), (size, 1))
    ids = corpus[(starts + torch.arange(config.context_length + 1)) % len(corpus)]
    return ids[:, :-1].to(device), ids[:, 1:].to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_curve_on_the_gpu(precision):
    """200 steps from the same start: the mean of each 20 losses is within 1 % (float32) or 3 % (bfloat16) or 0.02."""
    device = torch.device("cuda")
    curves = []
    for fused in (False, True):
        model = model_of(GPU_MODEL, device)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        step = fused_step(model, 16, dtype) if fused else plain_step(model, device, precision)
        torch.manual_seed(2)
        losses = torch.stack([step(*repeated_text(GPU_MODEL, 16, device))[0] for _ in range(200)])
        curves.append(losses.view(10, 20).mean(dim=1).tolist())
    assert curves[0][-1] < curves[0][0] / 2, "the task is learned"
    assert curves[1] == pytest.approx(curves[0], rel=0.01 if precision == "fp32" else 0.03, abs=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("layers_per_product", [1, 2])
def test_deterministic_steps_repeat_themselves(deterministic, layers_per_product):
    device = torch.device("cuda")
    runs = []
    for _ in range(2):
        model = model_of(GPU_MODEL, device)
        step = fused_step(model, 8, torch.bfloat16, layers_per_product=layers_per_product)
        torch.manual_seed(3)
        results = [torch.stack(step(*repeated_text(GPU_MODEL, 8, device))) for _ in range(20)]
        step.current()
        runs.append([*results, *(p.detach().clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("pipelined", [False, True])
def test_the_graph_is_the_eager_step(deterministic, pipelined):
    """Replays equal the same kernels launched one by one, bit by bit, with a learning rate that changes."""
    device = torch.device("cuda")
    models = [model_of(GPU_MODEL, device) for _ in range(2)]
    graph, eager = (fused_step(model, 8, torch.bfloat16, pipelined=pipelined) for model in models)
    for number in range(5):
        for step in (graph, eager):
            for group in step.optimizer.param_groups:
                group["lr"] = 1e-3 / (1 + number)
        batch = repeated_text(GPU_MODEL, 8, device)
        assert torch.equal(torch.stack(graph(*batch)), torch.stack(eager._eager(*batch)))
    graph.current()
    eager.current()
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.gpu
def test_muon_on_the_gpu():
    device = torch.device("cuda")
    model = model_of(GPU_MODEL, device)
    step = fused_step(model, 16, torch.bfloat16, name="muon")
    losses = [step(*repeated_text(GPU_MODEL, 16, device))[0].item() for _ in range(60)]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    assert all(torch.equal(copy, p.bfloat16()) for p, copy in step.transformer.copies.items())


@pytest.mark.gpu
def test_too_large_a_step_leaves_the_device_usable():
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info()
    config = ModelConfig(1000, context_length=4096, d_model=1024, num_layers=8, num_heads=16, d_ff=4096)
    rows = free // (8 * 1024 * 2 * 8)  # each layer keeps more than twice as many bytes for a row
    step = fused_step(model_of(config, device), max(1, rows // 4096), torch.bfloat16)
    batch = torch.zeros(step.shape, dtype=torch.int64, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        step(batch, batch)
    del step, batch
    torch.cuda.empty_cache()
    small = fused_step(model_of(GPU_MODEL, device), 2, torch.bfloat16)
    assert small(*repeated_text(GPU_MODEL, 2, device))[0].isfinite()
