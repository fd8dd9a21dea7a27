"""Choice of device, precision contexts, peaks and threads, with and without the hardware."""

import pytest
import torch

from lmcore import device
from lmcore.errors import UserError
from lmcore.recipes import RECIPES


@pytest.fixture
def hardware(monkeypatch):
    """Pretends that the machine has these devices."""

    def pretend(cuda: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


def test_auto_takes_cuda_then_mps_then_cpu_and_says_why(hardware):
    cases = (1, True, "cuda", "NVIDIA H200"), (0, True, "mps", "Metal"), (0, False, "cpu", "neither")
    for cuda, mps, name, word in cases:
        hardware(cuda, mps)
        chosen, reason = device.select_device("auto")
        assert chosen == torch.device(name)
        assert word in reason
        assert device.device_name(chosen) == {"cuda": "NVIDIA H200", "mps": "Apple Metal", "cpu": "CPU"}[name]
    hardware(cuda=2)
    assert device.select_device("cuda:1") == (torch.device("cuda:1"), "it was asked for")
    assert device.select_device("cpu")[0] == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "name", "sentence"),
    [
        (2, "cuda:2", "Device 'cuda:2' is not there: this machine shows 2 CUDA GPUs and no Apple Metal; use auto or"),
        (0, "meta", "Device 'meta' is not there"),
        (0, "gpu", r"There is no device 'gpu'; use auto, cpu, mps, cuda or cuda:N\.$"),
    ],
)
def test_a_device_that_is_not_there(hardware, gpus, name, sentence):
    hardware(cuda=gpus)
    with pytest.raises(UserError, match=sentence):
        device.select_device(name)


def test_precision_of_matmuls(monkeypatch):
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with device.autocast(torch.device("cpu"), precision):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    for kind, precision in (("cpu", "tf32"), ("mps", "bf16"), ("cuda", "fp32"), ("cuda", "tf32"), ("cuda", "bf16")):
        device.set_matmul_precision(torch.device(kind), precision)
    assert chosen == ["highest", "high", "high"]


@pytest.mark.parametrize(
    ("chip", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Quadro RTX 6000", "bf16", None),  # Turing has no bf16
        ("CPU", "fp32", None),
        # other variants of a known chip have other peaks: none is better than a wrong one
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("NVIDIA RTX 4090 D", "bf16", None),
    ],
)
def test_peak_flops(chip, precision, peak):
    assert device.peak_flops(chip, precision) == peak


@pytest.mark.parametrize(("there", "recipe", "best"), [(8, "smoke", 1), (8, "laptop", 8), (1, "laptop", 1)])
def test_a_small_model_gets_few_threads_and_all_are_there_again_after_it(monkeypatch, there, recipe, best):
    threads = [there]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with device.reproducible(RECIPES[recipe], torch.device("cpu")):
        assert threads[-1] == best
    assert threads[-1] == there
