"""The work that is measured, and the model's switches that exist for measuring."""

import contextlib

import pytest
import torch

from lmcore.accounting import least_step_bytes
from lmcore.config import ModelConfig, replace
from lmcore.errors import UserError
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.profiling.memory.profile import profile_memory_without_snapshot
from lmcore.profiling.workload import Workload, WorkloadConfig, case_grid, workload_config

SMALL = workload_config("smoke", context_length=16, vocab_size=50, batch_size=2, device="cpu", num_layers=3)


def recorded(workload):
    names = []

    @contextlib.contextmanager
    def span(name):
        names.append(name)
        yield

    return workload.step(span), names


def test_passes_run_their_parts_in_order():
    logits, names = recorded(Workload(SMALL))
    assert names == ["forward"]
    assert logits.shape == (2, 16, 50)
    assert not logits.requires_grad
    workload = Workload(replace(SMALL, passes="forward_backward"))
    before = [p.detach().clone() for p in workload.model.parameters()]
    loss, names = recorded(workload)
    assert names == ["forward", "loss", "backward"]
    assert loss.shape == ()
    assert all(torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))
    first = [p.grad.clone() for p in workload.model.parameters()]
    workload.step()  # gradients do not pile up
    assert all(torch.equal(a, p.grad) for a, p in zip(first, workload.model.parameters(), strict=True))
    workload = Workload(replace(SMALL, passes="train_step"))
    losses = [workload.step().item() for _ in range(5)]
    assert recorded(workload)[1] == ["forward", "loss", "backward", "optimizer"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_precisions(precision):
    workload = Workload(replace(SMALL, passes="train_step", precision=precision))
    assert torch.isfinite(workload.step())
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    assert Workload(replace(SMALL, precision=precision)).step().dtype == half
    assert all(p.dtype == torch.float32 for p in workload.model.parameters())


def trained(config):
    """Loss and gradients of a pass, and the bytes that it saved for backward."""
    torch.manual_seed(0)
    model, sizes = TransformerLM(config), []
    tokens = torch.randint(50, (2, 16))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        loss = cross_entropy(model(tokens), tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], sum(sizes)


@pytest.mark.parametrize("switches", [{}, {"dropout": 0.2, "norm": "post", "position": "sinusoidal"}])
def test_gradient_checkpointing_changes_no_number_and_saves_less(switches):
    config = replace(SMALL.model, **switches)
    numbers, saved = trained(config)
    for every in (1, 2, 3, 7):
        again, less = trained(replace(config, checkpoint_every=every))
        assert all(torch.equal(a, b) for a, b in zip(numbers, again, strict=True))
        assert less < saved / 2


@pytest.mark.parametrize("kernel", ["sdpa", "flash"])
def test_fused_attention_agrees_with_the_definition(kernel):
    torch.manual_seed(0)
    plain = TransformerLM(SMALL.model)
    fused = TransformerLM(replace(SMALL.model, attention=kernel))
    fused.load_state_dict(plain.state_dict())
    tokens = torch.randint(50, (2, 16))
    torch.testing.assert_close(plain(tokens), fused(tokens), rtol=1e-5, atol=1e-5)
    mask = torch.eye(16, dtype=torch.bool)  # a mask of one's own is followed all the same
    torch.testing.assert_close(plain(tokens, mask=mask), fused(tokens, mask=mask), rtol=1e-5, atol=1e-5)
    plain_loss, fused_loss = (cross_entropy(model(tokens), tokens) for model in (plain, fused))
    plain_loss.backward()
    fused_loss.backward()
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


SHAPES = [
    {},
    {"attention": "sdpa"},
    {"attention": "flash", "norm": "post"},
    {"norm": "none", "ffn": "silu", "dropout": 0.1},
    {"tie_embeddings": True, "position": "sinusoidal"},
    {"checkpoint_every": 1},
]


@pytest.mark.parametrize("switches", SHAPES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("passes", ["forward", "forward_backward", "train_step"])
def test_nothing_that_fits_is_refused(tmp_path, passes, precision, switches):
    """The least by arithmetic is never more than a step takes: of many activations, and of as many weights."""
    many = {"context_length": 64, "batch_size": 8}, {"context_length": 16, "batch_size": 4, "d_model": 64, "d_ff": 256}
    for shape in many:
        config = replace(
            workload_config("smoke", **shape, vocab_size=50, num_layers=2, device="cpu", **switches),
            passes=passes,
            precision=precision,
        )
        least = least_step_bytes(config.model, config.batch_size, passes, precision)
        measured = profile_memory_without_snapshot(config, tmp_path)["peak_bytes"]
        assert least <= measured
        assert least > measured / 10  # and it refuses what is far too large


def test_named_sizes_of_the_handouts():
    assert workload_config("2.35b").model.d_ff == 25_600
    config = workload_config("2.7b", context_length=512, precision="bf16", attention="sdpa")
    assert (config.model.d_model, config.model.context_length, config.model.vocab_size) == (2560, 512, 10_000)
    assert (config.batch_size, config.precision, config.model.attention, config.size) == (4, "bf16", "sdpa", "2.7b")
    assert config.tokens_per_step == 2048


def test_names_and_cases_of_a_grid():
    cases = case_grid(["smoke", "2.7b"], [64, 128], ["bf16"], ["forward"], batch_size=2, attention="sdpa")
    names = [f"{size}-{context}-bf16-forward" for context in (64, 128) for size in ("smoke", "2.7b")]
    assert list(cases) == names
    expected = {"batch_size": 2, "attention": "sdpa", "precision": "bf16", "passes": "forward"}
    assert cases[names[-1]] == workload_config("2.7b", 128, **expected)
    joined = cases | case_grid(["smoke"], [64], ["bf16", "fp32"], ["forward"], batch_size=2, attention="sdpa")
    assert len(joined) == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: workload_config("huge"), "no model size 'huge'"),
        (lambda: workload_config("small", depth=3), "no field depth"),
        (lambda: case_grid(["smoke"], [0]), "context_length"),
        (lambda: WorkloadConfig(steps=0), "steps must be a positive"),
        (lambda: WorkloadConfig(warmup_steps=-1), "warmup_steps must be"),
        (lambda: WorkloadConfig(passes="sideways"), "passes must be one of forward, forward_backward, train_step"),
        (lambda: WorkloadConfig(precision="fp8"), "precision must be one of"),
        (lambda: ModelConfig(attention="fast"), "attention must be one of plain, sdpa"),
        (lambda: ModelConfig(checkpoint_every=0), "checkpoint_every must be a positive"),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
