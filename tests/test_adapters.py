"""The courses' adapters against PyTorch's own operations, called as the courses' tests call them."""

import copy

import adapters
import official
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_reference import reference_attention, reference_logits

from lmcore.config import ModelConfig
from lmcore.files import read_json
from lmcore.model import TransformerLM

D, HEADS, FF, SEQ, THETA = 16, 4, 24, 10, 10_000.0


def test_layers():
    torch.manual_seed(0)
    x, w, v = (torch.randn(shape, dtype=torch.float64) for shape in ((2, SEQ, D), (FF, D), (D, FF)))
    ids = torch.tensor([[1, 3], [0, 2]])
    close = torch.testing.assert_close
    close(adapters.run_linear(D, FF, w, x), F.linear(x, w))
    close(adapters.run_embedding(FF, D, w, ids), F.embedding(ids, w))
    close(adapters.run_rmsnorm(D, 1e-5, w[0], x), F.rms_norm(x, (D,), w[0], 1e-5))
    close(adapters.run_silu(x), F.silu(x))
    close(adapters.run_swiglu(D, FF, w, v, w + 1, x), F.linear(F.silu(F.linear(x, w)) * F.linear(x, w + 1), v))
    close(adapters.run_softmax(x + 100, dim=1), x.softmax(1))
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    close(
        adapters.run_scaled_dot_product_attention(x, x + 1, -x, mask),
        F.scaled_dot_product_attention(x, x + 1, -x, attn_mask=mask),
    )
    logits, targets = torch.randn(8, 5), torch.randint(5, (8,))
    close(adapters.run_cross_entropy(logits, targets), F.cross_entropy(logits, targets))


def test_attention_and_the_model():
    torch.manual_seed(0)
    config = ModelConfig(50, SEQ, D, 2, HEADS, FF, rope_theta=THETA)
    weights = TransformerLM(config).state_dict()
    x, ids = torch.randn(2, SEQ, D), torch.randint(50, (2, SEQ))
    block = {name.removeprefix("layers.0."): w for name, w in weights.items() if name.startswith("layers.0.")}
    own = {name.removeprefix("attn."): w for name, w in block.items() if name.startswith("attn.")}
    qkvo = [own[f"{name}_proj.weight"] for name in ("q", "k", "v", "output")]
    rotated = adapters.run_multihead_self_attention_with_rope(D, HEADS, SEQ, THETA, *qkvo, x, torch.arange(SEQ))
    torch.testing.assert_close(rotated, reference_attention(config, own, x))
    assert not torch.allclose(adapters.run_multihead_self_attention(D, HEADS, *qkvo, x), rotated)
    assert adapters.run_transformer_block(D, HEADS, FF, SEQ, THETA, block, x).shape == x.shape
    logits = adapters.run_transformer_lm(50, SEQ, D, 2, HEADS, FF, THETA, weights, ids)
    torch.testing.assert_close(logits, reference_logits(config, weights, ids), rtol=1e-4, atol=1e-4)
    first = adapters.run_rope(D, THETA, SEQ, x, torch.arange(SEQ))[:, 0]
    torch.testing.assert_close(first, x[:, 0])  # position 0 is not rotated


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["pytorch", "triton"])
def test_flash_attention_functions(name, causal):
    if name == "triton":
        pytest.importorskip("triton")
    place = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    *inputs, do = (torch.randn(2, 48, 16, device=place, requires_grad=True) for _ in range(4))
    function = getattr(adapters, f"get_flashattention_autograd_function_{name}")()
    out = function.apply(*inputs, causal)
    lse = next(saved for saved in out.grad_fn.saved_tensors if saved.shape == (2, 48))
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    hidden = torch.ones(48, 48, dtype=torch.bool, device=place).triu(1) & causal
    scores = (q @ k.mT / 4).masked_fill(hidden, float("-inf"))
    want = scores.softmax(-1) @ v
    close = {"rtol": 1e-2, "atol": 1e-2} if place == "cuda" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), want, **close)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), **close)
    out.backward(do.detach())
    want.backward(do.detach().double())
    for ours, theirs in zip(inputs, (q, k, v), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **close)


WRAPPED = {
    "ddp": (adapters.get_ddp, adapters.ddp_on_after_backward),
    "sharded": (adapters.get_ddp, adapters.ddp_on_after_backward),
    "bucketed": (lambda model: adapters.get_ddp_bucketed(model, 1), adapters.ddp_bucketed_on_after_backward),
    "fsdp": (adapters.get_fsdp, adapters.fsdp_on_after_backward),
}


@pytest.fixture
def one_process():
    """A group of this process alone: what several do is tested in test_distributed.py."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", WRAPPED)
def test_distributed_classes(kind, one_process):
    """A step of gradient descent as the course's tests take it."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 4, bias=False), torch.arange(12.0).view(4, 3)
    alone, (wrap, after) = copy.deepcopy(model), WRAPPED[kind]
    wrapped = wrap(model)
    choices = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (alone, wrapped)]
    if kind == "sharded":
        choices[1] = adapters.get_sharded_optimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    for network, optimizer in zip((alone, wrapped), choices, strict=True):
        adapters.ddp_bucketed_on_train_batch_start(network, optimizer)
        (network(x).square().mean() / 10).backward()
        if network is wrapped:
            after(wrapped, optimizer)
        optimizer.step()
    weight = adapters.fsdp_gather_full_params(wrapped)["weight"] if kind == "fsdp" else model.weight
    torch.testing.assert_close(weight.detach(), alone.weight.detach())


COURSE = """
import torch, warnings
from .adapters import run_silu
def test_silu():
    torch.testing.assert_close(run_silu(torch.ones(1)), torch.tensor([0.7310586]))
def test_that_warns_and_fails():
    warnings.warn("so")
    assert False
def test_of_a_file():
    open("nowhere")
"""


def test_the_courses_tests_are_run_in_a_copy_of_a_checkout(tmp_path, monkeypatch):
    """All but those whose files are at nobody's hand, with what came out of each and where."""
    tests, record = tmp_path / "course" / "tests", tmp_path / "official.json"
    tests.mkdir(parents=True)
    for file, text in {"__init__": "", "adapters": "raise NotImplementedError", "test_course": COURSE}.items():
        (tests / f"{file}.py").write_text(text)
    words = [str(tests.parent), "--record", "A course", "--to", str(record), "--note", "random weights"]
    left_out = "test_of_a_file=nowhere is in no public copy"
    monkeypatch.setattr("sys.argv", ["official.py", *words, "--leave-out", left_out])
    assert official.main() == 1
    found = read_json(record)["A course"]
    assert found["tests"] == {
        "tests.test_course.test_silu": {"passed": 1},
        "tests.test_course.test_that_warns_and_fails": {"failure": 1},
    }
    assert (found["runs"], found["runs_that_failed"], found["warnings"], found["note"]) == (1, 1, 1, "random weights")
    assert found["left_out"] == {"test_of_a_file": "nowhere is in no public copy"}
    assert set(found["files"]) == {"__init__.py", "adapters.py", "test_course.py"}
    assert torch.backends.cpu.get_cpu_capability() in found["provenance"]["processor"]
    assert (tests / "adapters.py").read_text() == "raise NotImplementedError"


def test_a_checkout_without_tests_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["official.py", "nowhere"])
    assert official.main() == 2
    assert capsys.readouterr().err.startswith("Name a checkout of the course")
