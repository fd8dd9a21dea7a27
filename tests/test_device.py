"""Choice of device, precision contexts and peaks, with and without the hardware."""

import pytest
import torch

from lmcore import device
from lmcore.errors import UserError


@pytest.fixture
def hardware(monkeypatch):
    """Pretends that the machine has these devices."""

    def pretend(cuda: int = 0, mps: bool = False, name: str = "NVIDIA H200") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


def test_auto_takes_cuda_then_mps_then_cpu_and_says_why(hardware):
    hardware(cuda=1, mps=True)
    assert device.select_device() == (torch.device("cuda"), "a CUDA GPU is available (NVIDIA H200)")
    for mps, name, word in ((True, "mps", "Metal"), (False, "cpu", "neither")):
        hardware(mps=mps)
        chosen, reason = device.select_device("auto")
        assert chosen == torch.device(name)
        assert word in reason
    hardware(cuda=2)
    assert device.select_device("cuda:1") == (torch.device("cuda:1"), "it was asked for")
    assert device.select_device("cpu")[0] == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "name", "sentence"),
    [
        (0, "cuda", r"Device 'cuda' is not there: this machine shows 0 CUDA GPUs; use auto or cpu\.$"),
        (2, "cuda:2", "Device 'cuda:2' is not there: this machine shows 2 CUDA GPUs"),
        (0, "mps", r"Device 'mps' is not there: PyTorch finds no Apple Metal; use auto or cpu\.$"),
        (0, "gpu", r"There is no device 'gpu'; use auto, cpu, mps, cuda or cuda:N\.$"),
        (0, "meta", r"Device 'meta' is not supported; use auto, cpu, mps, cuda or cuda:N\.$"),
    ],
)
def test_a_device_that_is_not_there(hardware, gpus, name, sentence):
    hardware(cuda=gpus)
    with pytest.raises(UserError, match=sentence):
        device.select_device(name)


def test_device_name(hardware):
    hardware(cuda=1, name="NVIDIA A100-SXM4-80GB")
    assert device.device_name(torch.device("cuda")) == "NVIDIA A100-SXM4-80GB"
    assert device.device_name(torch.device("cpu")) == "CPU"
    assert device.device_name(torch.device("mps")) == "Apple Metal"


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_autocast_changes_the_products_precision(precision, dtype):
    with device.autocast(torch.device("cpu"), precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_matmul_precision_is_a_matter_of_cuda(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    device.set_matmul_precision(torch.device("cpu"), "tf32")
    device.set_matmul_precision(torch.device("mps"), "bf16")
    assert chosen == []
    for precision in ("fp32", "tf32", "bf16"):
        device.set_matmul_precision(torch.device("cuda"), precision)
    assert chosen == ["highest", "high", "high"]


@pytest.mark.parametrize(
    ("chip", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Quadro RTX 6000", "fp16", 130.5e12),
        ("Quadro RTX 6000", "bf16", None),  # Turing has no bf16
        # other chips, and other variants of a known one, have other peaks: none is better than a wrong one
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", None),
        ("Tesla T4", "fp16", None),
        ("CPU", "fp32", None),
    ],
)
def test_peak_flops(chip, precision, peak):
    assert device.peak_flops(chip, precision) == peak


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [(None, 2, ["0", "1"]), ("2,5", 2, ["2", "5"]), ("GPU-a,GPU-b,GPU-c", 2, ["GPU-a", "GPU-b"]), (None, 0, [])],
)
def test_visible_gpus_are_named_as_cuda_does(monkeypatch, variable, count, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert device.visible_gpus() == expected


@pytest.fixture
def four_threads(monkeypatch):
    """PyTorch has four threads, and nobody has said how many it should have."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [(lambda n: 0.02 / n, 4), (lambda n: 0.005 * n, 1), (lambda n: 0.01 / min(n, 2), 2), (lambda n: 0.01, 1)],
    ids=["as many as there are", "one", "two are enough", "no difference"],
)
def test_the_fastest_number_of_threads(four_threads, monkeypatch, seconds, best):
    now = [0.0]
    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])

    def work():
        now[0] += seconds(torch.get_num_threads())

    assert device.fastest_threads(torch.device("cpu"), work) == best
    assert torch.get_num_threads() == 4


def test_threads_are_left_alone_elsewhere_and_where_they_are_given(four_threads, monkeypatch):
    assert device.fastest_threads(torch.device("meta"), lambda: 1 / 0) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert device.fastest_threads(torch.device("cpu"), lambda: 1 / 0) is None
