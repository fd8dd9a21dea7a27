"""Ranges on the model's parts: the right ones, the same numbers, and nothing left behind."""

import contextlib

import pytest
import torch

import lmcore.model
from lmcore.config import model_config
from lmcore.model import TransformerLM
from lmcore.profiling.nsys.nvtx import annotated
from lmcore.profiling.workload import no_span

ATTENTION = ("computing attention scores", "computing softmax", "final matmul")


class Recorder:
    """A span that keeps the paths of what was entered, and what is open."""

    def __init__(self):
        self.paths, self.open = [], []

    @contextlib.contextmanager
    def __call__(self, name: str):
        self.open.append(name)
        self.paths.append("/".join(self.open))
        try:
            yield
        finally:
            assert self.open.pop() == name


TOKENS = torch.arange(32).reshape(2, 16)


def build(kernel="plain") -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(model_config("smoke", context_length=16, attention=kernel))


@pytest.mark.parametrize("kernel", ["plain", "sdpa"])
def test_ranges_of_a_forward_pass_change_no_bit(kernel):
    """Fused attention has its range, but no parts."""
    model, found = build(kernel), []
    for span in (no_span, Recorder()):
        model.zero_grad()
        with annotated(model, span):
            logits = model(TOKENS)
            logits.sum().backward()
        found.append([logits, *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))
    attention = ["/attention", "/attention/scaled dot product attention"]
    attention += [f"{attention[1]}/{part}" for part in ATTENTION if kernel == "plain"]
    block = ["", "/norm", *attention, "/norm", "/ffn"]
    expected = ["token embeddings", *(f"block {layer}{part}" for layer in (0, 1) for part in block), "norm", "lm head"]
    assert (span.paths, span.open) == (expected, [])


def test_nothing_is_left_behind_also_after_an_error():
    model, span = build(), Recorder()

    def state():
        kernels = [layer.attn.kernel for layer in model.layers]
        return lmcore.model.scaled_dot_product_attention, kernels, sum("forward" in vars(m) for m in model.modules())

    def fail(*_):
        raise RuntimeError("in the middle")

    before = state()
    model.layers[1].ffn.w2.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"), annotated(model, span):
        model(TOKENS)
    assert span.open == [], "every range was closed"
    assert state() == before
    with annotated(model, no_span):
        assert state() == before, "off touches nothing"
