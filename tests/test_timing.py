"""Timing: statistics, tables with rows that were not measured, both clocks."""

import contextlib
import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lmcore import accounting
from lmcore.config import ModelConfig, replace, to_dict
from lmcore.files import read_json
from lmcore.profiling import timing
from lmcore.profiling.cases import WorkloadConfig, case_grid, workload_config
from lmcore.profiling.readable import MISSING, median_spread, readable, spread, timed
from lmcore.profiling.workload import PHASES

MODEL = ModelConfig(vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=64)


def sample(wall: float, warmup: bool = False, cuda: float | None = None, **others: float) -> dict:
    counted = {"warmup": warmup, "device_allocations": None, "page_faults": 3}
    return {"wall": wall, "cuda": cuda} | dict.fromkeys(PHASES) | counted | others


def record(config: WorkloadConfig, *samples: dict, device: str = "NVIDIA H200", **changes) -> dict:
    result = {"device": device, "samples": samples, "peak_memory_bytes": 7}
    return {
        "case": "a", "config": json.loads(json.dumps(to_dict(config))), "outcome": "complete", "reason": None,
        "environment": {"device": device}, "result": result if samples else None,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([1.0, 2.0, 6.0], {"mean": 3.0, "std": math.sqrt(7), "median": 2.0, "spread": 5.2 - 1.2}),
        ([2.0, None], {"mean": 2.0, "std": None, "median": 2.0, "spread": None}),
        ([None], dict.fromkeys(("mean", "std", "median", "spread"))),
    ],
)
def test_summary_by_hand(samples, expected):
    assert timing.summary(samples) == expected


def test_warmups_are_no_measurements():
    """Columns by hand; the mean of the three steps is 4 s, their median, by which throughput counts, 3 s."""
    config = WorkloadConfig(model=MODEL, mode="train_step", precision="bf16")
    steps = sample(1.0, cuda=0.5, backward=0.25), sample(8.0, cuda=0.9), sample(3.0, cuda=0.7)
    samples = sample(9.0, warmup=True, cuda=9.0), *steps
    row = timing.timing_table({"a": record(config, *samples)}).iloc[0]
    assert (row["wall_mean"], row["wall_median"], row["wall_spread"]) == (4.0, 3.0, pytest.approx(7.0 - 1.4))
    assert (row["busy_median"], row["busy_share"], row["host_bound"], row["processes"]) == (None, None, None, 1)
    assert (row["wall_std"], row["cuda_mean"]) == (pytest.approx(math.sqrt(13)), pytest.approx(0.7))
    assert (row["backward_median"], row["optimizer_median"], row["tokens_per_second"]) == (0.25, None, 4 * 16 / 3.0)
    assert row["flops"] == accounting.training_flops(MODEL, 4)
    assert row["flops_per_second"] == pytest.approx(row["flops"] / 3.0)
    assert row["mfu"] == pytest.approx(row["flops"] / 3.0 / 989.4e12)
    long = timing.samples_table({"a": record(config, *samples)})
    assert long[["step", "warmup"]].values.tolist() == [[1, True], [2, False], [3, False], [4, False]]


def test_a_case_without_memory_is_a_row():
    config = workload_config("2.7b", 1024, mode="train_step")
    lost = record(config, outcome="out of memory", reason="2 GiB", environment=None)
    row, other = timing.timing_table({"b": lost, "a": record(config, sample(1.0), device="CPU")}).to_dict("records")
    assert [*map(row.get, ("size", "context_length", "outcome", "reason"))] == ["2.7b", 1024, "out of memory", "2 GiB"]
    empty = "wall_mean", "cuda_median", "tokens_per_second", "mfu", "peak_memory_bytes", "device"
    assert {row[name] for name in empty} == {None}
    assert (other["mfu"], other["cuda_median"]) == (None, None)  # of a chip whose peak nobody knows
    assert len(timing.samples_table({"b": lost})) == 0


def table(device="NVIDIA H200", **changes):
    """Of cases of which one did not fit."""
    steps = [sample(9.0, warmup=True), *(sample(wall) for wall in (0.03, 0.04, 0.05))]
    records = {
        name: record(replace(case, **changes), *steps, device=device)
        for name, case in case_grid(["small", "2.7b"], [256]).items()
    }
    lost = {"outcome": "out of memory", "reason": "CUDA out of memory.", "result": None}
    records["2.7b-256-fp32-train_step"] |= lost
    return timing.timing_table(records)


def test_a_table_for_readers():
    """Settings that are all the same and columns without a value are left out; a case that did not fit says so."""
    shown = readable(table())
    assert list(shown) == ["size", "mode", "mean ± std (ms)", "median (spread) (ms)", "tokens/s", "MFU", "peak memory"]
    assert shown.iloc[0].tolist()[1:5] == ["forward", "40.0 ± 10", "40.0 (16)", "25,600"]
    assert shown.iloc[-1].tolist()[1:] == ["training step", MISSING, "out of memory", MISSING, MISSING, MISSING]
    assert "MFU" not in readable(table("Chip A"))
    alone = readable(table(ops="fused").iloc[:1])
    assert (alone["ops"].tolist(), alone["attention"].tolist()) == (["fused"], ["plain"])


def test_a_time_has_the_digits_that_its_spread_leaves_and_its_busy_time_where_it_waits_for_the_host():
    shown = [spread(*values) for values in ((0.0345678, 0.000221), (0.5, None), (None, None))]
    assert shown == ["34.6 ± 0.22", "500", MISSING]
    row = {"outcome": "complete", "host_bound": False, "wall_median": 0.02478, "wall_spread": 0.001}
    row |= {"busy_median": 0.5, "busy_spread": None}
    assert timed(row) == "24.8 (1.0)"
    assert timed(row | {"host_bound": True}) == "24.8 (1.0); busy 500"
    assert timed(row | {"wall_spread": 0.0561}) == "24.8 (56); busy 500"  # it waits now and then
    assert timed(row | {"outcome": "out of memory", "wall_median": None}) == "out of memory"
    assert median_spread(row | {"busy_median": None}, "busy") == MISSING


def busy(*steps: float) -> dict:
    return {"busy_steps": [{"forward": step / 4, "step": step} for step in steps]}


def test_a_step_that_waits_for_the_host_is_known_by_its_busy_time():
    """Median and spread are over the steps of all processes; here the mean is another number."""
    waiting = record(WorkloadConfig(model=MODEL), *(sample(wall) for wall in (9.0, 10.0, 11.0)))
    waiting["result"] |= busy(4.0, 4.2)
    waiting["result"]["repeats"] = [{"samples": [sample(99.0, warmup=True), sample(30.0), sample(12.0)]} | busy(4.1)]
    full = record(WorkloadConfig(model=MODEL), sample(10.0), sample(11.0))
    full["result"] |= busy(9.6)
    rows = timing.timing_table({"a": waiting, "b": full}).to_dict("records")
    assert [row["processes"] for row in rows] == [2, 1]
    assert [row["wall_median"] for row in rows] == [11.0, 10.5]  # of 9, 10, 11, 12, 30
    assert [row["wall_spread"] for row in rows] == [pytest.approx(22.8 - 9.4), pytest.approx(0.8)]
    assert [row["busy_median"] for row in rows] == [4.1, 9.6]
    assert [row["busy_spread"] for row in rows] == [pytest.approx(0.16), None]
    assert [row["forward_busy_median"] for row in rows] == [pytest.approx(1.025), 2.4]
    assert [row["busy_share"] for row in rows] == [pytest.approx(4.1 / 11), pytest.approx(9.6 / 10.5)]
    assert [row["host_bound"] for row in rows] == [True, False]
    assert {"repeats", "busy_steps", "samples"}.isdisjoint(rows[0])


def case(host_bound, wall, busy=(math.nan, math.nan)):
    """A row: median and spread of the wall clock and of the busy time."""
    names = ("wall_median", "wall_spread", "busy_median", "busy_spread")
    return {"host_bound": host_bound} | dict(zip(names, (*wall, *busy), strict=True))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (case(False, (8.0, 1.6)), case(False, (4.0, 0.1)), (2.0, "wall")),
        (case(False, (8.0, 1.7)), case(False, (4.0, 0.1)), (math.nan, "wall")),  # wider than a fifth
        (case(True, (8.0, 7.0), (3.0, 0.1)), case(False, (4.0, 0.1), (2.0, 0.1)), (1.5, "busy")),
        (case(True, (8.0, 0.1), (3.0, 0.1)), case(True, (4.0, 0.1), (2.0, 0.5)), (math.nan, "busy")),
        # busy enough, but held up now and then
        (case(False, (8.0, 1.7), (7.5, 0.1)), case(False, (4.0, 0.1), (3.0, 0.1)), (2.5, "busy")),
        (case(None, (8.0, None)), case(None, (4.0, None)), (2.0, "wall")),  # on a CPU
        (case(None, (8.0, 0.1)), case(None, (math.nan, math.nan)), (math.nan, "wall")),  # out of memory
    ],
)
def test_noise_carries_no_conclusion(before, after, expected):
    assert timing.speedup(before, after) == (pytest.approx(expected[0], nan_ok=True), expected[1])


def test_what_waits_is_compared_by_busy_time():
    rows = case(True, (8.0, 0.1), (3.0, 0.1)), case(False, (8.0, 1.7), (7.5, 0.1)), case(False, (8.0, 1.6), (7.5, 0.1))
    assert [timing.comparable_seconds(row) for row in rows] == [3.0, 7.5, 8.0]
    assert math.isnan(timing.comparable_seconds(case(None, (None, None))))


def test_only_what_waits_for_the_host_is_measured_in_several_processes(tmp_path, monkeypatch):
    """And every process has its record, so that a run that is stopped goes on."""
    asked = []

    def run_cases(task, cases, folder, title):
        asked.append(list(cases))
        seconds = {"waits": 2.0, "waits.2": 3.0, "waits.3": 7.0, "full": 1.05, "cpu": 1.0}
        found = {name: record(config, sample(seconds[name])) | {"case": name} for name, config in cases.items()}
        for name in found.keys() - {"cpu"}:
            found[name]["result"] |= busy(1.0)
        return found

    monkeypatch.setattr(timing, "run_cases", run_cases)
    cases = dict.fromkeys(("waits", "full", "cpu"), WorkloadConfig(model=MODEL))
    found = timing.timing_table(timing.repeated(timing.measure, cases, tmp_path, "cases")).set_index("case")
    assert asked == [["waits", "full", "cpu"], ["waits.2", "waits.3"]]
    assert found["wall_median"].to_dict() == {"waits": 3.0, "full": 1.05, "cpu": 1.0}
    assert found["processes"].to_dict() == {"waits": 3, "full": 1, "cpu": 1}
    assert len(read_json(tmp_path / "waits.json")["result"]["repeats"]) == 2  # as a grader reads it


def test_busy_time_has_no_gaps_and_counts_no_moment_twice(monkeypatch):
    kernels = {"forward": [(0, 30), (40, 60)], "backward": [(100, 190), (150, 200)]}  # microseconds
    phases = []

    class Recorded(contextlib.AbstractContextManager):
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __exit__(self, *_):
            self.times = [("CUDA", False, *times) for times in kernels[phases.pop()]]
            self.times += [("CPU", False, 0, 1000), ("CUDA", True, 0, 1000)]  # a call that launches, a range of PyTorch

        def events(self):
            for device, of_user, start, end in self.times:
                kind, times = SimpleNamespace(name=device), SimpleNamespace(start=start, end=end)
                yield SimpleNamespace(device_type=kind, is_user_annotation=of_user, time_range=times)

    def step(span):
        for name in ("forward", "backward"):
            with span(name):
                phases.append(name)

    monkeypatch.setattr(torch.profiler, "profile", Recorded)
    found = timing.busy_seconds(step, torch.device("cpu"))
    assert found == {"forward": pytest.approx(50e-6), "backward": pytest.approx(100e-6), "step": pytest.approx(150e-6)}


def test_flops_of_a_step():
    forward = accounting.forward_flops(MODEL, 4)
    rows = [record(WorkloadConfig(model=MODEL, mode=mode), sample(1.0)) for mode in ("forward", "forward_backward")]
    table = timing.timing_table(dict(enumerate(rows)))
    assert table["flops"].tolist() == [forward, 3 * forward]


def test_the_clock_runs_until_the_device_has_done_the_step(tmp_path, monkeypatch):
    """A device that works on after the launch: its work before the step is not timed, that of the step is."""
    now, waiting = [0.0], [5.0]

    def synchronize(_):
        now[0], waiting[0] = now[0] + waiting[0], 0.0

    def step(self, span):
        with span("forward"):
            now[0], waiting[0] = now[0] + 1.0, waiting[0] + 99.0
        now[0], waiting[0] = now[0] + 1.0, waiting[0] + 100.0

    monkeypatch.setattr(timing, "default_timer", lambda: now[0])
    monkeypatch.setattr(timing.Clock, "synchronize", synchronize)
    monkeypatch.setattr(timing.Workload, "step", step)
    result = timing.measure(WorkloadConfig(model=MODEL, warmup_steps=1, steps=2, device="cpu"), tmp_path)
    times = {(step["wall"], step["cuda"], step["forward"], step["backward"]) for step in result["samples"]}
    assert times == {(201.0, None, 100.0, None)}
    assert [step["warmup"] for step in result["samples"]] == [True, False, False]
    assert (result["peak_memory_bytes"], result["busy_steps"]) == (None, [])


@pytest.mark.parametrize(("ops", "peak"), [("plain", 500), ("fused", 900)])
def test_on_a_gpu_seconds_are_of_events_and_the_peak_is_of_the_measured_steps(monkeypatch, ops, peak):
    """Events tell milliseconds, and are recorded on the device's own stream, which need not be the current device's.

    The first step makes most of the requests for memory, and has the highest peak; of a fused case that counts, as a
    CUDA graph's memory does only while it is captured.
    """
    seconds, requests, highest, steps = [0.0], [100], [0], [0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "stream of cuda:1"
            self.milliseconds = 1e3 * seconds[0]

        def elapsed_time(self, end):
            return end.milliseconds - self.milliseconds

    def step(span):
        for name, taken in ("forward", 0.25), ("backward", 0.5):
            with span(name):
                seconds[0] += taken
        seconds[0] += 0.125  # between phases
        steps[0] += 1
        requests[0] += 7 if steps[0] == 1 else 2
        highest[0] = max(highest[0], 900 if steps[0] == 1 else 500)

    for name, fake in {
        "Event": Event,
        "current_stream": lambda device=None: f"stream of {device}",
        "memory_stats": lambda device: {"num_device_alloc": requests[0]},
        "reset_peak_memory_stats": lambda device: highest.__setitem__(0, 0),
        "max_memory_allocated": lambda device: highest[0],
        "get_device_name": lambda device: "NVIDIA H200",
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "default_timer", lambda: 2 * seconds[0])
    monkeypatch.setattr(timing, "busy_seconds", lambda *_: {"step": 0.75})
    monkeypatch.setattr(timing, "joules_per_step", lambda *_: 12.0)
    result = timing.timed_steps(step, torch.device("cuda", 1), 1, 2, graphed=ops == "fused")
    for one in result["samples"]:
        assert (one["wall"], one["cuda"], one["forward"], one["backward"]) == (1.75, 0.875, 0.25, 0.5)
        assert one["loss"] is one["optimizer"] is None
    assert [one["device_allocations"] for one in result["samples"]] == [7, 2, 2]
    assert (result["peak_memory_bytes"], result["joules_per_step"]) == (peak, 12.0)
    assert result["busy_steps"] == ([{"step": 0.75}] * timing.BUSY_STEPS if ops == "plain" else [])


@pytest.mark.gpu
def test_both_clocks_agree_on_a_gpu(tmp_path):
    config = workload_config("small", 256, mode="train_step", warmup_steps=3, steps=5, device="cuda")
    result = timing.measure(config, tmp_path)
    measured = pd.DataFrame([step for step in result["samples"] if not step["warmup"]])
    assert (measured["cuda"] <= measured["wall"]).all()
    assert (measured["wall"] - measured["cuda"]).max() < 0.05 * measured["wall"].median()
    phases = measured[list(PHASES)].sum(axis=1)
    assert (phases <= measured["cuda"] * 1.001).all()
    assert phases.median() > 0.9 * measured["cuda"].median()
    assert result["peak_memory_bytes"] > 16 * accounting.num_parameters(config.model)
    busy = pd.DataFrame(result["busy_steps"])
    assert (busy[list(PHASES)].sum(axis=1) / busy["step"]).between(0.999, 1.001).all()
    assert busy["step"].between(0, 1.5 * measured["wall"].median(), inclusive="neither").all()


class FakeGPU(timing.Timer):
    """A GPU that needs 10 µs for a write and 5 µs for a function that the host needs 25 µs to queue."""

    def __init__(self):
        self.device, self.cuda, self.buffer, self.flush_seconds = torch.device("cpu"), True, self, 10e-6
        self.host = self.busy_until = 0.0

    def zero_(self):
        self.busy_until = max(self.busy_until, self.host) + 10e-6

    def function(self):
        self.host += 25e-6
        self.busy_until = max(self.busy_until, self.host) + 5e-6

    def now(self):
        moment = max(self.busy_until, self.host)
        return SimpleNamespace(moment=moment, query=lambda: moment <= self.host)

    def between(self, begin, end):
        return end.moment - begin.moment

    def synchronize(self):
        self.host = max(self.host, self.busy_until)


def test_a_call_that_the_gpu_waited_for_is_measured_again_behind_more_writes():
    timer = FakeGPU()
    assert timer.once(timer.function, 1)[0] == pytest.approx(20e-6)  # the write ends 15 µs before all is queued
    assert timer.waited
    seconds, _, flushes = timer.covered(timer.function, 1)
    assert (seconds, flushes, timer.waited) == (pytest.approx(5e-6), 4, False)


def test_writes_take_longer_than_the_host_needs_to_queue_a_function():
    timer = FakeGPU()
    for issue in (1e-7, 9.9e-6, 25e-6, 1e-3, 1.0):
        assert timer.flushes_for(issue) * timer.flush_seconds > 1.2 * issue
