"""What a model's passes are made of: kernels, categories and idle time by range (CS336 A2 nsys_profile): a case's task.

`python -m lmcore.profiling.nsys.profile config.json` is the program that Nsight Systems watches: it cannot look into a
notebook.
"""

import contextlib
import copy
import gc
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmcore.config import from_dict, to_dict
from lmcore.device import out_of_memory_reason, select_device
from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.nvtx import annotated
from lmcore.profiling.nsys.tool import find_nsys, last_words, run_under_nsys
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import Trace, busy_table, instances, totals, work_in
from lmcore.profiling.workload import Span, Workload, WorkloadConfig, no_span, require_memory

INFERENCE, TRAINING = "inference", "training step"
TOPS = {"inference": INFERENCE, "training": TRAINING}
"""Outermost ranges of what is recorded, one for each pass or step; the device has done its work when they end."""

TOP_KERNELS = 25


def profile_workload(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Profiles config.steps inference passes and training steps: a task of `lmcore.profiling.runner.run_cases`.

    config.mode says what a training step is; "forward" has none. With Nsight Systems on a CUDA device where it works,
    else with torch.profiler, in this process; `tool` says which, and the first of the `notes` why. Returns

    {"tool", "inference": S, "training": S | None, "training_outcome": None | "complete" | "out of memory",
     "training_reason", "notes": [sentence]}, with S of `summary`.

    A lack of memory in inference comes out as torch.OutOfMemoryError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device, _ = select_device(config.device)
    notes, trace = [], None
    if device.type == "cuda":
        try:
            trace, outcome = profile_with_nsys(config, folder)
        except UserError as error:
            notes.append(f"Profiled with torch.profiler instead of Nsight Systems: {error}")
    else:
        only = ", which only launch the GPU's work" if device.type == "mps" else ""
        notes.append(f"Nsight Systems sees CUDA alone: torch.profiler timed the CPU's operators{only}.")
    if trace is None:
        trace, outcome = profile_with_torch(config, folder)
    if config.compile:
        notes.append("A compiled model has no ranges on its modules, only on its passes.")
    notes += trace.notes
    found: dict[str, Any] = dict.fromkeys(TOPS)
    for part, top in TOPS.items():
        if (trace.ranges["path"] == top).any() and (part == "inference" or outcome["training_outcome"] == "complete"):
            found[part] = summary(trace, top)
    return {"tool": trace.tool, **found, **outcome, "notes": notes}


def run_passes(config: WorkloadConfig, span: Span, recording: AbstractContextManager) -> dict[str, Any]:
    """Warm-ups, then inside `recording` config.steps inference passes and as many training steps (not for "forward").

    All warm-ups come first. A lack of memory in training ends the training alone; in inference it is raised.
    Returns training_outcome (None, "complete" or "out of memory") and training_reason.
    """
    inference = Workload(replace(config, mode="forward"))
    training = copy.copy(inference)  # the same model and batch
    training.config = config
    outcome: dict[str, Any] = {"training_outcome": None, "training_reason": None}
    # a compiled model has no modules left to see, and ranges would break its graph
    with annotated(training.model, no_span if config.compile else span):
        repeat(inference, config.warmup_steps, "warm-up", span)
        if config.mode != "forward":
            outcome = train(training, config.warmup_steps, "warm-up", span)
        with recording:
            repeat(inference, config.steps, INFERENCE, span)
            if outcome["training_outcome"] == "complete":
                outcome = train(training, config.steps, TRAINING, span)
    return outcome


def repeat(workload: Workload, times: int, name: str, span: Span) -> None:
    """Steps in ranges of this name, each waited for."""
    workload.synchronize()
    for _ in range(times):
        with span(name):
            workload.step(span)
            workload.synchronize()


def train(workload: Workload, times: int, name: str, span: Span) -> dict[str, Any]:
    """Training steps as by `repeat`, and their outcome. What a step that did not fit had allocated is given back."""
    try:
        require_memory(workload.config, workload.device)
        repeat(workload, times, name, span)
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
    else:
        return {"training_outcome": "complete", "training_reason": None}
    workload.optimizer.zero_grad(set_to_none=True)
    workload.optimizer.state.clear()
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"training_outcome": "out of memory", "training_reason": reason}


def profile_with_nsys(config: WorkloadConfig, folder: Path) -> tuple[Trace, dict[str, Any]]:
    """The trace and the training's outcome, from the program under Nsight Systems.

    Raises `UserError` if that does not work, also where the inference does not fit.
    """
    nsys = find_nsys()
    settings, outcome, log = folder / "config.json", folder / "outcome.json", folder / "nsys.log"
    write_json(settings, to_dict(config))
    outcome.unlink(missing_ok=True)
    program = [sys.executable, "-m", "lmcore.profiling.nsys.profile", str(settings)]
    export = run_under_nsys(nsys, program, folder)
    require(outcome.exists(), f"The program under nsys ended before it was done ({last_words(log)}); see {log}.")
    return read_export(export), read_json(outcome)


def main(path: Path) -> None:
    """Runs the workload of a config file under the CUDA profiler's switch; outcome.json is written beside the file."""
    config, on_cuda = from_dict(WorkloadConfig, read_json(path)), torch.cuda.is_available()
    recording = torch.cuda.profiler.profile() if on_cuda else contextlib.nullcontext()
    outcome = run_passes(config, torch.cuda.nvtx.range if on_cuda else no_span, recording)
    write_json(path.with_name("outcome.json"), outcome)


def profile_with_torch(config: WorkloadConfig, folder: Path) -> tuple[Trace, dict[str, Any]]:
    """The trace and the training's outcome, by torch.profiler in this process.

    The record is kept as profile.json.gz, for Perfetto or chrome://tracing.
    """
    profiler, record = torch.profiler.profile(), folder / "profile.json.gz"
    outcome = run_passes(config, torch.profiler.record_function, profiler)
    profiler.export_chrome_trace(str(record))
    return read_torch_trace(record), outcome


def summary(trace: Trace, top: str) -> dict[str, list[dict[str, Any]]]:
    """What one pass of those named `top` is made of, by path, such as `inference/forward/block */ffn`, blocks together,
    and modules of one list: `step/Encoder/layers[*]`.

    Rows: "ranges" {path, instances, seconds, gpu_seconds, busy_seconds, idle_seconds}, sums over the instances in a
    pass (`busy_table`), of which the median over passes is taken; "categories" {path, category, calls, seconds} of all
    work; "kernels" {path, name, short_name, category, calls, seconds}, the first of each path. Calls and seconds are
    means over passes.
    """
    starts, paths = instances(trace, top)["start"], trace.ranges["path"]
    paths = paths[(paths == top) | paths.str.startswith(f"{top}/")]
    ranges, categories, kernels = [], [], []
    for path in dict.fromkeys(re.sub(r"(?<=\bblock )\d+|(?<=\[)\d+(?=\])", "*", path) for path in paths):
        (chosen, work), busy = work_in(trace, path), busy_table(trace, path).set_index("instance")
        in_pass = np.searchsorted(starts, chosen.set_index("id")["start"].reindex(busy.index), side="right")
        clocks = busy[["seconds", "gpu_seconds", "busy_seconds", "idle_seconds"]].groupby(in_pass).sum().median()
        ranges.append({"path": path, "instances": len(chosen) / len(starts), **clocks})
        for keys, part, rows, most in (
            (["category"], work, categories, None),
            (["name", "short_name", "category"], work[work["bytes"] < 0], kernels, TOP_KERNELS),
        ):
            table = totals(part, keys).head(most)
            table = table.assign(calls=table["calls"] / len(starts), seconds=table["total_seconds"] / len(starts))
            rows += table[[*keys, "calls", "seconds"]].assign(path=path).to_dict("records")
    return {"ranges": ranges, "categories": categories, "kernels": kernels}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
