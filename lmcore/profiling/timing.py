"""How long a step takes, by two clocks, and what it takes of the memory (CS336 A2 section 1.1.3; CSE599-O 5.3)."""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from timeit import default_timer
from typing import Any

import pandas as pd
import torch

from lmcore import accounting
from lmcore.config import ModelConfig, from_dict
from lmcore.device import device_name, peak_flops
from lmcore.profiling.workload import PHASES, Workload, WorkloadConfig

MODEL_COLUMNS = (
    "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "context_length", "attention", "checkpoint_every"
)  # fmt: skip
CASE_COLUMNS = ("batch_size", "passes", "precision", "ops", "compile", "warmup_steps", "steps")
MEASURED = ("peak_memory_bytes", "peak_reserved_bytes")
SAMPLE_COLUMNS = (
    "cell", "size", "context_length", "passes", "precision", "ops", "compile", "warmup_steps", "step", "warmup", "wall",
    "cuda", *PHASES, "device_allocations", "page_faults",
)  # fmt: skip
"""Columns of every table of samples, in order; those of a later version may have more."""


class Stopwatch:
    """Times one step and its phases on a device.

    On CUDA by events, which the GPU stamps as it comes to them, so that a phase needs no synchronization of its own;
    elsewhere by the wall clock at the phases' ends, which on a CPU is when the work is done.
    """

    def __init__(self, workload: Workload):
        self.workload = workload
        self.cuda = workload.device.type == "cuda"
        self.marks: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """The present moment: a recorded CUDA event, or the wall clock once the device has done its work."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.workload.device))
            return event
        self.workload.synchronize()
        return default_timer()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times what runs inside it."""
        begin = self.now()
        yield
        self.marks.append((name, begin, self.now()))

    def step(self) -> dict[str, float | int | None]:
        """Runs one step: seconds by `wall` and `cuda` clock (None without CUDA) and of each phase; and `counters`."""
        self.marks.clear()
        before = self.counters()
        self.workload.synchronize()
        began = default_timer()
        begin = self.now() if self.cuda else None
        self.workload.step(self.span)
        end = self.now() if self.cuda else None
        self.workload.synchronize()
        sample: dict[str, float | int | None] = {"wall": default_timer() - began}
        sample["cuda"] = between(begin, end) if self.cuda else None
        sample |= {phase: None for phase in PHASES} | {name: between(*marks) for name, *marks in self.marks}
        return sample | {name: None if n is None else n - before[name] for name, n in self.counters().items()}

    def counters(self) -> dict[str, int | None]:
        """What has been counted so far, None where nobody counts it.

        `device_allocations`: requests of PyTorch's allocator to the CUDA driver for memory; `page_faults`: pages of
        memory that the process touched for the first time (not on Windows).
        """
        allocations = torch.cuda.memory_stats(self.workload.device).get("num_device_alloc") if self.cuda else None
        if sys.platform == "win32":
            return {"device_allocations": allocations, "page_faults": None}
        import resource

        return {"device_allocations": allocations, "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt}


def between(begin: Any, end: Any) -> float:
    """Seconds from one moment of `Stopwatch.now` to another; CUDA events must have been synchronized with."""
    return begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin


def measure(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times `config.steps` steps after `config.warmup_steps` warm-ups: a task of `lmcore.profiling.runner.run_cases`.

    Every step is timed, the warm-ups too, but only the others are measurements: compilation, which happens in the
    first step, is not among them unless there is no warm-up. Peak memory is that of the measured steps, None without
    CUDA. The result holds `samples`, one for each step with `warmup` true or false, in order.
    """
    return timed_steps(Workload, config)


def timed_steps(kind: Callable[[WorkloadConfig], Workload], config: WorkloadConfig) -> dict[str, Any]:
    """`measure` of the workload that `kind` makes of the case, whatever it takes for a step."""
    began = default_timer()
    workload = kind(config)
    workload.synchronize()
    setup_seconds = default_timer() - began
    watch = Stopwatch(workload)
    warmups = [watch.step() for _ in range(config.warmup_steps)]
    if watch.cuda:
        torch.cuda.reset_peak_memory_stats(workload.device)
    measured = [watch.step() for _ in range(config.steps)]
    return {
        "device": device_name(workload.device),
        "setup_seconds": setup_seconds,
        "samples": [sample | {"warmup": True} for sample in warmups]
        + [sample | {"warmup": False} for sample in measured],
        "peak_memory_bytes": torch.cuda.max_memory_allocated(workload.device) if watch.cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(workload.device) if watch.cuda else None,
    }


def summary(samples: Sequence[float | None]) -> dict[str, float | None]:
    """mean, std, median and min of samples; std is the sample's, with n - 1, and None for a single one."""
    values = [value for value in samples if value is not None]
    if not values:
        return dict.fromkeys(("mean", "std", "median", "min"))
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "median": statistics.median(values),
        "min": min(values),
    }


def step_flops(model: ModelConfig, batch_size: int, passes: str) -> int:
    """Matmul FLOPs of one step; the optimizer's, and what gradient checkpointing computes twice, are not counted."""
    count = accounting.forward_flops if passes == "forward" else accounting.training_flops
    return count(model, batch_size)


def timing_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each record of `run_cases(measure, …)`: what was run, how it ended, seconds, bytes and FLOP/s.

    `wall_` columns are by the host's clock with a synchronization on both sides, `cuda_` columns by CUDA events, None
    without CUDA; phases by CUDA events where there are, else by the host's clock. A case without a measurement, as for
    lack of memory, keeps what was asked for, and None elsewhere. `mfu` is None for a chip of unknown peak. Whatever
    else `timed_steps` returns is a column of the same name.
    """
    return pd.DataFrame([_row(record) for record in records.values()]).astype(object).replace({float("nan"): None})


def as_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in a record as it was run: the fused step has FlashAttention and compiles nothing, whatever the
    switches of the others say. Records from before there was a choice of `ops` are plain."""
    if config.get("ops", "plain") == "plain":
        return {**config, "ops": "plain"}
    return {**config, "compile": False, "model": {**config["model"], "attention": "flash"}}


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    config = as_run(record["config"])
    model, measured = from_dict(ModelConfig, config["model"]), dict(record["result"] or {})
    steps = [sample for sample in measured.pop("samples", ()) if not sample["warmup"]]
    seconds = {name: summary([step[name] for step in steps]) for name in ("wall", "cuda", *PHASES)}
    flops = step_flops(model, config["batch_size"], config["passes"])
    median = seconds["wall"]["median"]
    device = measured.pop("device", None) or (record["environment"] or {}).get("device")
    peak = peak_flops(device, config["precision"]) if device else None
    return {
        "cell": record["cell"],
        "size": config["size"],
        **{name: getattr(model, name) for name in MODEL_COLUMNS},
        **{name: config[name] for name in CASE_COLUMNS},
        "outcome": record["outcome"],
        "reason": record["reason"],
        "num_parameters": accounting.num_parameters(model),
        **{f"{clock}_{what}": value for clock in ("wall", "cuda") for what, value in seconds[clock].items()},
        **{f"{phase}_{what}": seconds[phase][what] for phase in PHASES for what in ("mean", "std", "median")},
        "tokens_per_second": config["batch_size"] * model.context_length / median if median else None,
        "flops": flops,
        "flops_per_second": flops / median if median else None,
        "mfu": flops / median / peak if median and peak else None,
        **{name: None for name in MEASURED} | measured,
        "device": device,
    }


def samples_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Every step that was timed, in long form: a row for each, `step` counts from 1 at the first warm-up of a case.

    Whatever `Stopwatch.step` returns is a column of the same name.
    """
    rows = []
    for record in records.values():
        config = as_run(record["config"])
        head = {
            "cell": record["cell"],
            "size": config["size"],
            "context_length": config["model"]["context_length"],
            **{name: config[name] for name in ("passes", "precision", "ops", "compile", "warmup_steps")},
        }
        samples = (record["result"] or {}).get("samples", ())
        rows += [head | {"step": number} | sample for number, sample in enumerate(samples, 1)]
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*SAMPLE_COLUMNS, *(name for row in rows for name in row)])))
