"""FlashAttention against the definition in float64: the tiled explanation and Triton's portable kernels."""

import pytest
import torch
from attention_cases import TOLERANCE, assert_close, by_module, defined, packed
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.errors import UserError
from lmcore.fast.kernels.attention import attention_forward, backward_op, flash_attention, forward_op, reference


@pytest.fixture(scope="module")
def gpu():
    """Triton's portable kernels: in the interpreter, or on a GPU."""
    return pytest.importorskip("lmcore.fast.kernels.attention.gpu", reason="Triton is not installed")


# the explanation


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 8), st.booleans())
def test_tiled_attention_is_the_definition(length, size, tile, causal):
    tensors = packed(2, length, 3, size, torch.float64, seed=length)
    assert_close(by_module(reference, *tensors, causal, tile=tile), defined(*tensors, causal), 1e-12)


# the public function


@pytest.mark.parametrize("shape", [(3, 7, 16), (2, 1, 3, 7, 16), (0, 2, 3, 16), (2, 2, 0, 16)])
@pytest.mark.parametrize(("dtype", "strided"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, True)])
def test_any_leading_dimensions_types_and_strides(shape, dtype, strided, device):
    q, k, v, do = (torch.randn(shape).to(device, dtype) for _ in range(4))
    if strided:  # features that are not side by side, and a gradient that is one number
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
        do = torch.ones(1, device=device, dtype=dtype).expand(shape)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = flash_attention(q, k, v)
    assert (o.dtype, o.shape) == (dtype, shape)
    found = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
    if q.numel():
        assert_close(found, defined(q, k, v, do, True), TOLERANCE[dtype])
    assert [x.shape for x in found] == 4 * [torch.Size(shape)]


def test_operators_keep_their_promises(device):
    q, k, v, do = packed(1, 5, 2, 16, device=device)
    torch.library.opcheck(forward_op, (q, k, v, True))
    o, lse = attention_forward(q, k, v, True)
    torch.library.opcheck(backward_op, (q, k, v, o, lse, do, True))


def test_compiled_and_under_autocast(device):
    q, k, v, do = packed(2, 9, 2, 16, device=device)
    q.requires_grad_()
    found = []
    with torch.autocast(device.type, torch.bfloat16):
        for function in (torch.compile(flash_attention, fullgraph=True, backend="aot_eager"), flash_attention):
            o = function(q, k, v)
            assert o.dtype == torch.bfloat16
            found.append((o.detach(), torch.autograd.grad(o, q, do.bfloat16())[0]))
    for ours, plain, wanted in zip(*found, defined(q, k, v, do, True)[:2], strict=True):
        assert torch.equal(ours, plain)
        assert (plain.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_what_is_kept_is_the_log_sum_exp_alone(device):
    q, k, v = (x.contiguous().requires_grad_() for x in packed(2, 128, 2, 16, device=device)[:3])
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x, lambda x: x
    ):
        flash_attention(q, k, v)
    assert sorted(sizes.values()) == [4 * 2 * 2 * 128] + 4 * [q.nbytes]


def test_inputs_that_do_not_fit_are_refused():
    x, longer = torch.zeros(2, 3, 5, 16), torch.zeros(2, 3, 9, 16)
    for tensors in ((x, longer, longer), (x, x, x[..., :8]), (x, x, x.double()), (x[0, 0],) * 3, (x.long(),) * 3):
        with pytest.raises(UserError):
            flash_attention(*tensors)


# Triton's kernels

PORTABLE = [(1, 16, True), (17, 80, False), (65, 48, False), (130, 16, True), (130, 16, False), (97, 20, True)]


@pytest.mark.parametrize(
    ("dtype", "length", "size", "causal"),
    [(torch.float32, *case) for case in PORTABLE]
    + [(dtype, *case) for dtype in (torch.float16, torch.bfloat16) for case in PORTABLE[-3:]],
)
def test_portable_kernels_are_the_definition(gpu, length, size, causal, dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 as if they were integers")
    tensors = packed(1, length, 2, size, dtype, device, seed=length)
    found = by_module(gpu, *tensors, causal)
    assert_close(found, defined(*tensors, causal), TOLERANCE[dtype])
    if device.type == "cuda":  # the interpreter has one order
        assert all(map(torch.equal, found, by_module(gpu, *tensors, causal))), "the same bits every time"


@pytest.mark.parametrize("group", [2, 100])
def test_any_number_of_heads_in_a_group(gpu, group, device, monkeypatch):
    """Programs go by length over the heads of a group, of which the first may have fewer."""
    monkeypatch.setattr(gpu, "heads_of_group", lambda *given: group)
    monkeypatch.setattr(gpu, "forward_tiles", lambda q: gpu.Tiles(16, 32, 4, 1))
    monkeypatch.setattr(gpu, "backward_tiles", lambda q: {"both": gpu.Tiles(32, 32, 4, 1)})
    tensors = packed(1, 70, 5, 16, device=device)
    assert_close(by_module(gpu, *tensors, True), defined(*tensors, True), 1e-5)


SCALES = {"large": (100.0, 100.0), "one wins": (1e3, 1e1), "equal": (0.0, 1.0), "negative": (-30.0, 30.0)}


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")  # outside the tensor
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("implementation", ["tiled", "portable"])
def test_extreme_scores(request, kind, implementation, device):
    """Scores of ten thousand, all alike, or all far below zero, where exponentials of scores would vanish."""
    module = reference if implementation == "tiled" else request.getfixturevalue("gpu")
    q, k, v, do = packed(1, 70, 1, 16, device=device)
    if kind == "negative":
        q, k = q.abs(), k.abs()
    q, k = q * SCALES[kind][0], k * SCALES[kind][1]
    for causal in (True, False):
        wanted = defined(q, k, v, do, causal)
        scores = (q.double() @ k.double().mT / 4).abs().max().item()
        assert (scores > 5e3) == (kind != "equal")
        # a score of 1e4 is known to 1e-3 in float32, and so is its exponential, here as in the definition; where one
        # key has all the weight, dQ and dK are zero, and computed as differences of numbers as large as K and Q
        slack = 1e-6 * max(q.norm().item(), k.norm().item())
        assert_close(by_module(module, q, k, v, do, causal), wanted, max(1e-5, 2e-7 * scores), slack)
