"""One's own PyTorch code under the profilers: time, energy, ranges and memory by owner, on a plain module."""

import ctypes
import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmcore.cli import main
from lmcore.errors import EXIT_OUT_OF_MEMORY, UserError
from lmcore.profiling import energy
from lmcore.profiling.nsys.nvtx import range_names
from lmcore.profiling.nsys.profile import summary
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import busy_table, instances, totals
from lmcore.profiling.own import profile_kernels, record_memory, time_steps

WIDTH, BATCH = 16, 32


class Net(nn.Module):
    """A list of layers, a head, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.head(x)


def training(device="cpu", passes=1):
    """A step of so many backward passes and an update, its model and optimizer."""
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(BATCH, WIDTH, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        for _ in range(passes):
            model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


WEIGHTS = 4 * (2 * (WIDTH * WIDTH + WIDTH) + WIDTH + 1)


def test_times_of_a_step():
    calls = []
    found = time_steps(lambda: calls.append(1), warmup=2, steps=3, tokens=10, device="cpu")
    assert (len(calls), found["device"]) == (5, "CPU")
    assert found["tokens_per_second"] == 10 / found["wall_median"] > 0
    empty = ("cuda_median", "busy_median", "busy_share", "peak_memory_bytes", "joules_per_step", "joules_per_token")
    assert {found[name] for name in empty} == {None}


def test_ranges_of_a_step_and_the_record_that_is_kept(tmp_path):
    """Of every module, backward pass and update; nothing stays on the model, PyTorch or the optimizer."""
    step, model, _ = training()
    model.head.forward = functools.partial(nn.Linear.forward, model.head)  # a wrapper of one's own
    before = (torch.autograd.backward, [dict(vars(module)) for module in model.modules()])
    trace = profile_kernels(step, model, warmup=1, steps=2, folder=tmp_path / "new")
    assert before == (torch.autograd.backward, [dict(vars(module)) for module in model.modules()])
    first = trace.ranges[trace.ranges["start"] < instances(trace, "step")["end"].iloc[0]]["path"].tolist()
    layers = [f"step/Net/layers[{n}]{part}" for n in (0, 1) for part in ("", f"/layers[{n}].0", f"/layers[{n}].1")]
    assert first == ["step", "step/Net", *layers, "step/Net/head", "step/backward", "step/optimizer"]
    assert len(busy_table(trace, "step")) == 2
    rows = {row["path"]: row for row in summary(trace, "step")["ranges"]}
    assert rows["step/Net/layers[*]"]["instances"] == 2
    assert 0 < rows["step/backward"]["busy_seconds"] < rows["step"]["busy_seconds"] < rows["step"]["seconds"]
    kinds = totals(trace.kernels, ["category"]).set_index("category")
    assert {"optimizer", "matmul"} <= set(kinds.index)
    assert (kinds["bytes"] == 0).all()
    again = read_torch_trace(tmp_path / "new" / "profile.json.gz")
    assert [again.ranges.equals(trace.ranges), again.work.equals(trace.work)] == [True, True]


def test_ranges_without_a_model_and_of_other_models():
    assert set(profile_kernels(training()[0], steps=1).ranges["path"]) == {"step", "step/backward", "step/optimizer"}
    names = range_names(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.ReLU()))
    assert names == {"": "Sequential", "0": "0", "0.0": "0[0]", "1": "1"}
    (compiled := training()[1]).compile()
    assert range_names(compiled) == {}


def test_memory_by_owner_is_what_arithmetic_says():
    """AdamW's state is two moments of every weight and a step count of 4 bytes for every tensor."""
    step, model, optimizer = training()
    found = record_memory(step, model, optimizer)
    owned = {"parameters": WEIGHTS, "gradients": WEIGHTS, "optimizer state": 2 * WEIGHTS + 6 * 4}
    for when in ("before", "after", "most"):
        assert {name: found[f"{when}_by_category"][name] for name in owned} == owned
    assert found["before_by_category"]["other"] == 4 * WIDTH  # the buffer
    activations = found["most_by_category"]["activations"]  # each layer's output, times the buffer; the result
    assert 4 * BATCH * WIDTH * 4 <= activations < 4 * BATCH * WIDTH * 5
    assert [row["name"] for row in found["stages"]] == ["forward", "backward", "optimizer"]
    levels = found["timeline"]["bytes"].values()
    assert found["peak_bytes"] == sum(found["peak_by_category"].values()) == max(map(sum, zip(*levels, strict=True)))
    assert any(row["source"] == "gradient of layers.0.0.weight" for row in found["largest"])
    assert any("test_own_profilers.py" in row["source"] for row in found["largest"])


def test_stages_of_several_passes_and_of_none():
    step, model, optimizer = training(passes=2)
    found = record_memory(step, model, optimizer)
    assert [row["name"] for row in found["stages"]] == ["forward", "backward", "forward 2", "backward 2", "optimizer"]
    assert found["after_by_category"]["gradients"] == WEIGHTS
    alone = record_memory(step, optimizer=optimizer)
    assert alone["before_by_category"]["parameters"] == WEIGHTS
    assert any(row["source"] == "gradient of parameter 0" for row in alone["largest"])
    without = record_memory(lambda: torch.ones(1000).sum(), warmup=0, device="cpu")
    assert [(row["name"], row["peak_bytes"]) for row in without["stages"]] == [("step", 4004)]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: time_steps(torch.ones(1)), "step must be a function without arguments, not tensor"),
        (lambda: time_steps(print, steps=0), "steps must be positive"),
        (lambda: profile_kernels(print, warmup=-1), "warmup not negative, not 3 and -1"),
        (lambda: record_memory(print, device="cuda:99"), "Device 'cuda:99' is not there"),
    ],
)
def test_what_measures_nothing_is_refused(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


class FakeNVML:
    """A GPU of 100 W whose counter moves every 50 ms, by a clock that each step moves by 7 ms."""

    def __init__(self, counts=True):
        self.counts, self.milliseconds, self.nvmlInit_v2 = counts, 0, lambda: 0

    def step(self):
        self.milliseconds += 7

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        return int(name != b"GPU-abc")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong))[0] = 100 * (self.milliseconds // 50 * 50)
        return 0 if self.counts else 3  # not supported


def test_joules_of_a_step_are_counted_between_two_moves_of_the_counter(monkeypatch):
    def joules(library):
        monkeypatch.setattr(ctypes, "CDLL", library)
        return energy.joules_per_step(nvml.step, torch.device("cuda"))

    nvml = FakeNVML()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(energy, "synchronize", lambda device: None)
    monkeypatch.setattr(energy, "default_timer", lambda: nvml.milliseconds / 1e3)
    assert joules(lambda name: nvml) == pytest.approx(0.7, rel=0.01)
    assert joules(lambda name: FakeNVML(counts=False)) is None
    assert energy.joules_per_step(nvml.step, torch.device("cpu")) is None

    def missing(name):
        raise OSError

    assert joules(missing) is None


MODULE = """
import torch
def made():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    return step, model, optimizer
def number(): return 7
def needs(something): pass
"""


def test_the_command_profiles_a_function_of_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_steps.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["profile", "my_steps:made", "--tokens", "4", "--out", "out"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(words in said for words in ("tokens per second:", "step/backward 1", "optimizer state 288 bytes"))
    assert len(read_torch_trace(tmp_path / "out" / "profile.json.gz").ranges)
    assert json.loads((tmp_path / "out" / "memory.json").read_text())["peak_by_category"]["parameters"] == 288
    for name, sentence in (
        ("my_steps", "Name a function as module:function"),
        ("no_steps:made", "No module named 'no_steps'"),
        ("my_steps:mad", "has no attribute 'mad'"),
        ("my_steps:needs", "missing a required argument: 'something'"),
        ("my_steps:number", "my_steps:number returned 7; let it return step"),
    ):
        assert main(["profile", name]) == 2
        assert re.fullmatch(f"lmcore: .*{re.escape(sentence)}.*\n", capsys.readouterr().err)


@pytest.mark.gpu
def test_a_step_of_one_s_own_on_a_gpu(tmp_path):
    step, model, optimizer = training("cuda")
    times = time_steps(step, steps=5, tokens=BATCH, device="cuda")
    assert 0 < times["busy_median"] < times["wall_median"] > times["cuda_median"] / 1.2
    assert times["joules_per_step"] is None or 0 < times["joules_per_step"] / times["wall_median"] < 1500  # watts
    trace = profile_kernels(step, model, folder=tmp_path)
    assert trace.tool == "torch.profiler (CUDA)"
    assert (busy_table(trace, "step")[["busy_seconds", "idle_seconds"]] > 0).all(axis=None)
    memory = record_memory(step, model, optimizer)
    assert memory["peak_bytes"] == memory["torch_requested_peak_bytes"]
    assert memory["most_by_category"]["gradients"] == memory["before_by_category"]["parameters"] == WEIGHTS
    assert len(memory["timeline"]["seconds"]) > 10


def test_a_step_that_does_not_fit_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "too_large.py").write_text("import torch\n\ndef made():\n    return lambda: torch.empty(1 << 58)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "too_large:made"]) == EXIT_OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert said.startswith("lmcore: out of memory: ")
    assert said.count("\n") == 1
