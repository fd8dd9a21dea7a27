"""FlashAttention's kernels for Hopper: compiled without the chip, held against the definition on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import TOLERANCE, assert_close, by_module, defined, packed

from lmcore.fast.kernels.attention import attention_backward, attention_forward, hopper_kernels
from lmcore.fast.kernels.dispatch import is_hopper


def test_hopper_kernels_compile_without_a_gpu():
    """For the chip, not on it: registers suffice, and matrix products stay asynchronous (ptxas says if not)."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("hopper_compilation.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == 2 * ["attention_forward_kernel", "attention_backward_kernel"]


@pytest.fixture
def hopper():
    """The kernels, on a GPU that has the instructions."""
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda")) and hopper_kernels() is not None):
        pytest.skip("needs a GPU with Hopper's instructions")
    from lmcore.fast.kernels.attention import hopper

    return hopper


HOPPER = [
    *((torch.bfloat16, size, length) for size in (16, 32, 48, 64, 80, 96, 128) for length in (17, 129, 1000)),
    *((torch.bfloat16, 64, length) for length in (1, 64, 127, 256)),
    *((torch.float16, size, 129) for size in (64, 80)),
]
"""Few of the combinations, since each kind of kernel is compiled for more than a second."""


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "size", "length"), HOPPER)
def test_hopper_kernels_are_the_definition(hopper, dtype, size, length, causal, device, monkeypatch):
    tensors = q, *_ = packed(2, length, 3, size, dtype, device, seed=torch.randint(2**31, ()).item())
    wanted = defined(*tensors, causal)
    assert_close(by_module(hopper, *tensors, causal), wanted, TOLERANCE[dtype])
    # short sequences may have gone to the portable kernels: now all shapes of tiles that there are, whatever the length
    monkeypatch.setattr(hopper, "portable_is_faster", lambda *given, **also: False)
    for forward in {hopper.forward_tiles(hopper.block_of(q), n) for n in (256, 4096)}:
        monkeypatch.setattr(hopper, "forward_tiles", lambda *given, forward=forward: forward)
        monkeypatch.setattr(hopper, "LAUNCHES", {})
        assert_close(by_module(hopper, *tensors, causal), wanted, TOLERANCE[dtype])


@pytest.mark.gpu
def test_hopper_kernels_with_keys_far_below_zero(hopper, device):
    """Keys behind the last position are zeros: their exponentials would overflow beside scores far below zero."""
    q, k, v, do = packed(1, 100, 2, 64, torch.bfloat16, device)
    q, k = q.abs() * 10, -k.abs() * 10
    found = [*attention_forward(q, k, v, False)]
    found[1:] = attention_backward(q, k, v, *found, do, False)
    assert_close(found, defined(q, k, v, do, False), 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32, 64])
def test_warpgroups_never_overtake_their_buffers(hopper, size, device, monkeypatch):
    """Thousands of programs at a time, many times: every shape of tiles gives the same bits again."""
    q, k, v, _ = packed(32, 512, 12, size, torch.bfloat16, device)
    for tiles in {hopper.forward_tiles(size, length) for length in (256, 4096)}:
        monkeypatch.setattr(hopper, "forward_tiles", lambda *given, tiles=tiles: tiles)
        monkeypatch.setattr(hopper, "LAUNCHES", {})
        first = hopper.forward(q, k, v, True, torch.empty_like(q))
        for _ in range(200):
            again = hopper.forward(q, k, v, True, torch.empty_like(q))
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[1], again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [512, 1000])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_tiles_of_keys_leave_shared_memory_before_the_next_come(hopper, size, length, device):
    """Hundreds of tiles, several a program up to head size 64: right, and dK and dV the same in each bit again."""
    from lmcore.fast.kernels.attention import gpu

    q, k, v, do = packed(16, length, 12, size, torch.bfloat16, device)
    o, lse = hopper.forward(q, k, v, True, torch.empty_like(q))
    first = hopper.backward(q, k, v, o, lse, do, True, *(torch.empty_like(x) for x in (q, k, v)))
    assert_close([o, *first], by_module(gpu, q, k, v, do, True), 2 * TOLERANCE[torch.bfloat16])
    for _ in range(100):
        dq, dk, dv = hopper.backward(q, k, v, o, lse, do, True, *(torch.empty_like(x) for x in (q, k, v)))
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        assert (dq - first[0]).abs().max() <= 0.01 * first[0].abs().max()


@pytest.mark.gpu
def test_an_order_that_is_asked_for_is_kept(hopper, deterministic, device):
    q, k, v, do = packed(2, 1024, 20, 64, torch.bfloat16, device)
    o, lse = attention_forward(q, k, v, True)
    fixed = attention_backward(q, k, v, o, lse, do, True)
    for _ in range(10):
        assert all(map(torch.equal, fixed, attention_backward(q, k, v, o, lse, do, True)))
