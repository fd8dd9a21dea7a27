"""The work that is measured, and the model's switches that exist for measuring."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.accounting import least_step_bytes
from lmcore.config import replace
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.profiling.cases import workload_config
from lmcore.profiling.memory.profile import profile_memory_without_snapshot
from lmcore.profiling.workload import Workload

SMALL = workload_config("smoke", context_length=16, vocab_size=50, batch_size=2, device="cpu", num_layers=3)


def test_passes_run_their_parts_in_order():
    names = []

    @contextlib.contextmanager
    def span(name):
        names.append(name)
        yield

    logits = Workload(SMALL).step(span)
    assert (names, logits.shape, logits.requires_grad) == (["forward"], (2, 16, 50), False)
    workload = Workload(replace(SMALL, mode="forward_backward"))
    before = [p.detach().clone() for p in workload.model.parameters()]
    assert workload.step(span).shape == ()
    assert names[1:] == ["forward", "loss", "backward"]
    assert all(torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))
    first = [p.grad.clone() for p in workload.model.parameters()]
    workload.step()  # gradients do not pile up
    assert all(torch.equal(a, p.grad) for a, p in zip(first, workload.model.parameters(), strict=True))
    workload = Workload(replace(SMALL, mode="train_step"))
    losses = [workload.step(span).item() for _ in range(5)]
    assert names[-4:] == ["forward", "loss", "backward", "optimizer"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_precisions(precision):
    workload = Workload(replace(SMALL, mode="train_step", precision=precision))
    assert torch.isfinite(workload.step())
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    assert Workload(replace(SMALL, precision=precision)).step().dtype == half
    assert all(p.dtype == torch.float32 for p in workload.model.parameters())


def trained(config, **options):
    """Loss and gradients of a pass from weights of seed 0, and the bytes that it saved for backward."""
    torch.manual_seed(0)
    model, sizes = TransformerLM(config), []
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        loss = cross_entropy(model(tokens, **options), tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], sum(sizes)


@pytest.mark.parametrize("switches", [{}, {"dropout": 0.2, "norm": "post", "position": "sinusoidal"}])
def test_gradient_checkpointing_changes_no_number_and_saves_less(switches):
    config = replace(SMALL.model, **switches)
    numbers, saved = trained(config)
    for every in (1, 2, 7):
        again, less = trained(replace(config, checkpoint_every=every))
        assert all(torch.equal(a, b) for a, b in zip(numbers, again, strict=True))
        assert less < saved / 2


@pytest.mark.parametrize("mask", [None, torch.eye(16, dtype=torch.bool)], ids=["causal", "a mask of one's own"])
def test_fused_attention_agrees_with_the_definition(mask):
    plain, *fused = (trained(replace(SMALL.model, attention=name), mask=mask)[0] for name in ("plain", "sdpa", "flash"))
    for numbers in fused:
        torch.testing.assert_close(numbers, plain, rtol=1e-4, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["forward", "forward_backward", "train_step"]), st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([
        {}, {"attention": "sdpa"}, {"attention": "flash", "norm": "post"}, {"checkpoint_every": 1},
        {"norm": "none", "ffn": "silu", "dropout": 0.1}, {"tie_embeddings": True, "position": "sinusoidal"},
    ]),
    st.sampled_from([{"context_length": 64, "batch_size": 8}, {"context_length": 16, "d_model": 64, "d_ff": 256}]),
)  # fmt: skip
def test_nothing_that_fits_is_refused(mode, precision, switches, shape):
    """The least by arithmetic is never more than a step takes: of many activations, and of as many weights."""
    way = {"vocab_size": 50, "num_layers": 2, "device": "cpu", "mode": mode, "precision": precision} | switches
    config = workload_config("smoke", **shape, **way)
    least = least_step_bytes(config, mode)
    measured = profile_memory_without_snapshot(config, None)["peak_bytes"]
    assert measured / 10 < least <= measured  # it also refuses what is far too large
