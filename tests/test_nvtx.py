"""Ranges on the model's parts: the right ones, the same numbers, and nothing left behind."""

import contextlib

import pytest
import torch

import lmcore.model
from lmcore.config import model_config
from lmcore.functional import scaled_dot_product_attention
from lmcore.model import TransformerLM
from lmcore.profiling.nsys.nvtx import annotated, annotated_scaled_dot_product_attention, nvtx_span
from lmcore.profiling.workload import Workload, no_span, workload_config

ATTENTION = ("computing attention scores", "computing softmax", "final matmul")


class Recorder:
    """A span that keeps the paths of what was entered, and what is open."""

    def __init__(self):
        self.paths: list[str] = []
        self.open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str):
        self.open.append(name)
        self.paths.append("/".join(self.open))
        try:
            yield
        finally:
            assert self.open.pop() == name


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TransformerLM(model_config("smoke", context_length=16))


@pytest.fixture
def tokens():
    return torch.arange(32).reshape(2, 16)


def test_ranges_of_a_forward_pass(model, tokens):
    span = Recorder()
    with annotated(model, span):
        model(tokens)
    block = ["", "/norm", "/attention", "/norm", "/ffn"]
    block[3:3] = ["/attention/scaled dot product attention"] + [
        f"/attention/scaled dot product attention/{part}" for part in ATTENTION
    ]
    expected = ["token embeddings", *(f"block {layer}{part}" for layer in (0, 1) for part in block), "norm", "lm head"]
    assert span.paths == expected
    assert span.open == []


def test_results_are_bitwise_the_same(model, tokens):
    plain = model(tokens)
    plain.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with annotated(model, Recorder()):
        ranged = model(tokens)
        ranged.sum().backward()
    assert torch.equal(plain, ranged)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_annotated_attention_is_the_definition(dtype, masked):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 7, 8, dtype=dtype) for _ in range(3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril() if masked else None
    span = Recorder()
    ranged = annotated_scaled_dot_product_attention(q, k, v, mask, span=span)
    assert torch.equal(ranged, scaled_dot_product_attention(q, k, v, mask))
    assert [path.rpartition("/")[2] for path in span.paths] == ["scaled dot product attention", *ATTENTION]


@pytest.mark.parametrize("kernel", ["plain", "sdpa"])
def test_nothing_is_left_behind_also_after_an_error(tokens, kernel):
    model = TransformerLM(model_config("smoke", context_length=16, attention=kernel))

    def state():
        kernels = [layer.attn.kernel for layer in model.layers]
        return lmcore.model.scaled_dot_product_attention, kernels, sum("forward" in vars(m) for m in model.modules())

    def fail(*_):
        raise RuntimeError("in the middle")

    def run():
        with annotated(model, span):
            assert all(one != other for one, other in zip(state()[::2], before[::2], strict=True))
            model(tokens)

    before, span = state(), Recorder()
    handle = model.layers[1].ffn.w2.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run()
    handle.remove()
    assert span.open == [], "every range was closed"
    assert state() == before
    with annotated(model, no_span):
        assert state() == before, "off touches nothing"


@pytest.mark.parametrize("kernel", ["sdpa", "flash"])
def test_fused_attention_has_its_range(tokens, kernel):
    model = TransformerLM(model_config("smoke", context_length=16, attention=kernel))
    plain = model(tokens)
    span = Recorder()
    with annotated(model, span):
        assert torch.equal(plain, model(tokens))
    assert "block 0/attention/scaled dot product attention" in span.paths
    assert not any(part in path for part in ATTENTION for path in span.paths)


def test_checkpointed_blocks_are_entered_again_in_the_backward_pass():
    config = workload_config("smoke", 16, mode="forward_backward", device="cpu", checkpoint_every=1)
    workload, span = Workload(config), Recorder()
    with annotated(workload.model, span):
        workload.step(span)
    assert span.open == []
    assert {"forward/block 0", "forward/block 1", "backward/block 0", "backward/block 1"} <= set(span.paths)


def test_nvtx_ranges_are_pushed_and_popped(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: said.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    with pytest.raises(KeyError), nvtx_span("block {0}"), nvtx_span("norm"):
        raise KeyError
    assert said == ["block {0}", "norm", "pop", "pop"]
