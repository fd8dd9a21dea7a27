"""How long a function or a step takes, and what a step takes of the memory (CS336 A2 section 1.1.3; CSE599-O 5.3)."""

import contextlib
import math
import os
import resource
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from timeit import default_timer
from typing import Any

import pandas as pd
import torch

from lmcore import accounting
from lmcore.config import ModelConfig, from_dict
from lmcore.device import device_name, peak_flops, synchronize
from lmcore.files import write_json
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.energy import joules_per_step
from lmcore.profiling.nsys.trace import occupied
from lmcore.profiling.runner import Task, run_cases
from lmcore.profiling.workload import PHASES, Step, Workload, no_span

FLUSH_BYTES = 1 << 28
"""Written between measurements on a GPU, so that a measurement finds its inputs in the memory and not in the cache."""

BUDGET = {"cuda": 0.2, "mps": 0.2, "cpu": 0.1}
"""Seconds that the repetitions of one measurement may take together, beyond the first `LEAST`."""

LEAST, MOST = 3, 50
"""Repetitions of one measurement."""

TRIES = 4
"""Times that a call is measured again because the GPU waited for the host."""

BUSY_STEPS = 3
"""Steps after the timed ones in which the GPU's busy time is measured."""

BUSY_SHARE = 0.9
"""A step waits for the host where its GPU is busy for a smaller part of its time."""

PROCESSES = 3
"""Processes in which a case that waits for the host is measured."""

NOISE = 0.2
"""A spread wider than this part of the median carries no conclusion."""

MODEL_COLUMNS = (
    "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length", "attention", "checkpoint_every"
)  # fmt: skip
RUN_COLUMNS = ("mode", "precision", "ops", "compile", "warmup_steps")


class Clock:
    """The time on a device: CUDA events, which need no synchronization where they are recorded, or the wall clock."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"

    def now(self) -> Any:
        """The present moment: a recorded CUDA event, or the wall clock once the device has done its work."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        self.synchronize()
        return default_timer()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one moment to another; CUDA events must have been synchronized with."""
        return begin.elapsed_time(end) / 1e3 if self.cuda else end - begin

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        synchronize(self.device)


class Timer(Clock):
    """Seconds that a function keeps a device busy.

    On a GPU, the host first queues writes that take longer than it needs to queue the function: the kernels then run
    back to back, and CUDA events around them see the GPU's time and no waiting for the host. The writes also drive
    the inputs out of the cache. Elsewhere the wall clock is used, and inputs that fit into the cache stay there.
    """

    waited = False
    """Whether the GPU may have waited for the host in the last call."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        if self.cuda:
            self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
            self.flush_seconds = statistics.median(self.once(self.buffer.zero_, 0)[0] for _ in range(5))

    def __call__(self, function: Callable[[], Any], least: int = LEAST) -> float:
        """Median seconds of `least` calls or more, after two others: a warm-up, and one by which writes are counted."""
        self.once(function, 0)
        flushes = self.flushes_for(self.once(function, int(self.cuda))[1])
        taken, began = [], default_timer()
        while len(taken) < least or (len(taken) < MOST and default_timer() - began < BUDGET[self.device.type]):
            seconds, _, flushes = self.covered(function, flushes)
            taken.append(seconds)
        return statistics.median(taken)

    def covered(
        self, function: Callable[[], Any], flushes: int, reset: Callable[[], Any] | None = None
    ) -> tuple[float, float, int]:
        """`once`, and the writes that it took: again behind twice as many where the GPU had to wait for the host.

        A function that itself waits for the GPU is never covered, nor is one of more launches than can wait for it: its
        last try counts, and the next begins with as few writes as this one.
        """
        for times in range(TRIES):
            seconds, issue = self.once(function, flushes << times, reset)
            if not self.waited:
                return seconds, issue, flushes << times
        return seconds, issue, flushes

    def flushes_for(self, issue: float) -> int:
        """How many writes take longer than the `issue` seconds that the host needs to queue a function."""
        return math.ceil(1.5 * issue / self.flush_seconds) if self.cuda else 0

    def once(
        self, function: Callable[[], Any], flushes: int, reset: Callable[[], Any] | None = None
    ) -> tuple[float, float]:
        """Seconds of one call, on a GPU behind this many writes, and those in which the host hands it the work.

        `reset` is called before, untimed: what works in place then finds its inputs as they were.
        """
        if reset is not None:
            reset()
        self.synchronize()
        for _ in range(flushes):
            self.buffer.zero_()
        begin, began = self.now(), default_timer()
        function()
        issued, end = default_timer() - began, self.now()
        self.waited = self.cuda and flushes > 0 and begin.query()  # the GPU was done with the writes: it may have idled
        self.synchronize()
        return self.between(begin, end), issued


class Stopwatch(Clock):
    """Times a step and its phases, on CUDA without a synchronization between them."""

    def __call__(self, step: Step) -> dict[str, float | int | None]:
        """Runs one step: seconds by `wall` and `cuda` clock (None without CUDA) and of each phase; and `counters`."""
        marks: dict[str, tuple[Any, Any]] = {}

        @contextlib.contextmanager
        def span(name: str) -> Iterator[None]:
            begin = self.now()
            yield
            marks[name] = begin, self.now()

        before = self.counters()
        self.synchronize()
        began = default_timer()
        begin = self.now() if self.cuda else None
        step(span)
        end = self.now() if self.cuda else None
        self.synchronize()
        sample: dict[str, Any] = {"wall": default_timer() - began}
        sample["cuda"] = self.between(begin, end) if self.cuda else None
        sample |= dict.fromkeys(PHASES) | {name: self.between(*edges) for name, edges in marks.items()}
        return sample | {name: None if n is None else n - before[name] for name, n in self.counters().items()}

    def counters(self) -> dict[str, int | None]:
        """What has been counted so far, None where nobody counts it.

        `device_allocations`: requests of PyTorch's allocator to the CUDA driver for memory; `page_faults`: pages of
        memory that the process touched for the first time.
        """
        allocations = torch.cuda.memory_stats(self.device).get("num_device_alloc") if self.cuda else None
        return {"device_allocations": allocations, "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt}


def measure(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`timed_steps` of a benchmark case: a task of `lmcore.profiling.runner.run_cases`.

    Of a fused case the peak memory is that of all steps: a CUDA graph's memory counts only while it is captured, in the
    first one; and it has no `busy_steps`, as the profiler may miss a graph that was captured before it started.
    """
    workload, graphed = Workload(config), config.ops == "fused"
    return timed_steps(workload.step, workload.device, config.warmup_steps, config.steps, graphed)


def timed_steps(step: Step, device: torch.device, warmup: int, steps: int, graphed: bool = False) -> dict[str, Any]:
    """Times `steps` calls of `step(span)` after `warmup` others.

    Every step is timed, the warm-ups too, but only the others are measurements: compilation, which happens in the
    first step, is not among them unless there is no warm-up. Peak memory is that of the measured steps, None without
    CUDA. The result holds `samples`, one for each step with `warmup` true or false, in order, `busy_steps`, the
    `busy_seconds` of a few more steps, and `joules_per_step` of further ones, None where no GPU counts them.
    """
    watch, samples = Stopwatch(device), []
    for number in range(warmup + steps):
        if watch.cuda and number == (0 if graphed else warmup):
            torch.cuda.reset_peak_memory_stats(device)
        samples.append(watch(step) | {"warmup": number < warmup})
    result = {
        "device": device_name(device),
        "samples": samples,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if watch.cuda else None,
    }
    busy = [busy_seconds(step, device) for _ in range(BUSY_STEPS if watch.cuda and not graphed else 0)]
    return result | {"busy_steps": busy, "joules_per_step": joules_per_step(partial(step, no_span), device)}


def busy_seconds(step: Step, device: torch.device) -> dict[str, float]:
    """Seconds of a step in which the GPU works, by phase and in all (`step`): torch.profiler's record of its kernels,
    copies and fills without the gaps in which it waits for the host. The step has to name its phases."""
    found: dict[str, float] = {}

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield
            synchronize(device)
        on_gpu = [e for e in profile.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]
        times = [(name, e.time_range.start, e.time_range.end) for e in on_gpu]  # microseconds
        found[name] = occupied(pd.DataFrame(times, columns=["instance", "start", "end"]))["busy"].sum() / 1e6

    step(span)
    return found | {"step": sum(found.values())}


def repeated(
    task: Task, cases: Mapping[str, WorkloadConfig], folder: str | os.PathLike, title: str, processes: int = PROCESSES
) -> dict[str, dict[str, Any]]:
    """`run_cases` of a timing task; a case whose steps wait for the host is measured in so many processes.

    How fast a host launches kernels differs between processes, so one of them says little. Each further process has a
    record of its own, <name>.2 and so on; their results stand in the first's, also its file's, as `repeats`.
    """
    records = run_cases(task, cases, folder, title)
    waiting = [name for name, record in records.items() if _row(record)["host_bound"]]
    more = {f"{name}.{number}": cases[name] for name in waiting for number in range(2, processes + 1)}
    again = run_cases(task, more, folder, f"{title}, repeated")
    for name in waiting:
        repeats = [again[f"{name}.{number}"]["result"] for number in range(2, processes + 1)]
        result = records[name]["result"] | {"repeats": [result for result in repeats if result]}
        records[name] = records[name] | {"result": result}
        write_json(Path(folder) / f"{name}.json", records[name])
    return records


def summary(samples: Iterable[float | None]) -> dict[str, float | None]:
    """mean, std, median and spread of samples; std is the sample's, with n - 1, and None for a single one.

    The spread is the distance from the 10th to the 90th percentile, None for a single sample.
    """
    values = [value for value in samples if value is not None]
    if not values:
        return dict.fromkeys(("mean", "std", "median", "spread"))
    found = {"mean": statistics.fmean(values), "std": None, "median": statistics.median(values), "spread": None}
    if len(values) > 1:
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        found |= {"std": statistics.stdev(values), "spread": tenths[-1] - tenths[0]}
    return found


def is_noisy(row: Mapping[str, Any], clock: str = "wall") -> bool:
    """Whether a row's times spread by more than a fifth of their median, or were not measured. A single one has no
    spread, and says nothing about it."""
    median, spread = row[f"{clock}_median"], row[f"{clock}_spread"]
    return pd.isna(median) or (pd.notna(spread) and spread > NOISE * median)


def by_busy_time(row: Mapping[str, Any]) -> bool:
    """Whether a row is compared by the GPU's busy time: it waits for the host, always or so often that its times by the
    clock are noise."""
    return pd.notna(row["busy_median"]) and (bool(row["host_bound"]) or is_noisy(row))


def comparable_seconds(row: Mapping[str, Any]) -> float:
    """The median by which a case is compared: busy where that is to be `by_busy_time`, else wall. NaN without one."""
    median = row["busy_median" if by_busy_time(row) else "wall_median"]
    return math.nan if median is None else float(median)


def speedup(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, str]:
    """How many times as fast the case of one row is as that of the other, and by which clock: wall, or busy where
    either is to be compared `by_busy_time`. NaN where noise allows no conclusion.
    """
    clock = "busy" if by_busy_time(before) or by_busy_time(after) else "wall"
    noisy = is_noisy(before, clock) or is_noisy(after, clock)
    return (math.nan if noisy else before[f"{clock}_median"] / after[f"{clock}_median"]), clock


def timing_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each record of `run_cases` or `repeated`: what was run, how it ended, seconds, bytes and FLOP/s.

    `wall_` columns are by the host's clock with a synchronization on both sides, `cuda_` columns by CUDA events, None
    without CUDA; phases by CUDA events where there are, else by the host's clock; `busy_` columns are `busy_seconds`.
    All are over the steps of all `processes`. `host_bound` where the GPU is busy for less than `BUSY_SHARE` of the
    time, None where that was not measured. `flops` are those of matmuls, without what gradient checkpointing computes
    twice; `mfu` is None for a chip of unknown peak. A case without a measurement, as for lack of memory, keeps what was
    asked for, and None elsewhere.
    """
    return pd.DataFrame([_row(record) for record in records.values()]).astype(object).replace({float("nan"): None})


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    config, measured = record["config"], record["result"] or {}
    model, batch_size = from_dict(ModelConfig, config["model"]), config["batch_size"]
    results = [measured, *measured.get("repeats", ())]
    columns = measured_columns(results, batch_size * model.context_length)
    flops = accounting.forward_flops if config["mode"] == "forward" else accounting.training_flops
    flops, median = flops(model, batch_size), columns["wall_median"]
    device = measured.get("device") or (record["environment"] or {}).get("device")
    peak = peak_flops(device, config["precision"]) if device else None
    return {
        "case": record["case"],
        "size": config["size"],
        **{name: getattr(model, name) for name in MODEL_COLUMNS},
        **{name: config[name] for name in ("batch_size", *RUN_COLUMNS, "steps")},
        "outcome": record["outcome"],
        "reason": record["reason"],
        "num_parameters": accounting.num_parameters(model),
        "processes": len(results) if median else None,
        **columns,
        "flops": flops,
        "flops_per_second": flops / median if median else None,
        "mfu": flops / median / peak if median and peak else None,
        "peak_memory_bytes": measured.get("peak_memory_bytes"),
        "device": device,
    }


def measured_columns(results: Iterable[Mapping[str, Any]], tokens: int | None) -> dict[str, Any]:
    """The columns of `timing_table` that follow from what `timed_steps` returned, in one process or several, of steps
    of so many `tokens` (None: not known)."""
    samples, busy = ([step for one in results for step in one.get(key, ())] for key in ("samples", "busy_steps"))
    steps = [sample for sample in samples if not sample["warmup"]]
    seconds = {name: summary([step[name] for step in steps]) for name in ("wall", "cuda")}
    seconds |= {"busy": summary([step["step"] for step in busy])}
    for phase in PHASES:
        seconds[phase] = summary([step[phase] for step in steps])
        seconds[f"{phase}_busy"] = summary([step.get(phase) for step in busy])
    median = seconds["wall"]["median"]
    share = seconds["busy"]["median"] / median if busy else None
    joules = summary([one.get("joules_per_step") for one in results])["median"]
    return {
        **{f"{name}_{what}": value for name, found in seconds.items() for what, value in found.items()},
        "busy_share": share,
        "host_bound": None if share is None else share < BUSY_SHARE,
        "tokens_per_second": tokens / median if tokens and median else None,
        "joules_per_step": joules,
        "joules_per_token": joules / tokens if tokens and joules else None,
    }


def samples_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Every step that was timed, in long form: a row for each, `step` counts from 1 at the first warm-up of a case.

    Whatever `Stopwatch` returns is a column of the same name.
    """
    rows = []
    for record in records.values():
        config = record["config"]
        head = {"case": record["case"], "context_length": config["model"]["context_length"]}
        head |= {name: config[name] for name in ("size", *RUN_COLUMNS)}
        samples = (record["result"] or {}).get("samples", ())
        rows += [head | {"step": number} | sample for number, sample in enumerate(samples, 1)]
    return pd.DataFrame(rows)
