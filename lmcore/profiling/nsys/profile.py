"""What a model's passes are made of: kernels, categories and idle time by range (CS336 A2 nsys_profile): a case's task.

`python -m lmcore.profiling.nsys.profile config.json` is the program that Nsight Systems watches: it cannot look into a
notebook.
"""

import contextlib
import copy
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmcore.config import from_dict, to_dict
from lmcore.device import select_device, synchronize
from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.nvtx import annotated
from lmcore.profiling.nsys.tool import find_nsys, last_words, run_under_nsys
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import Trace, busy_table, instances, totals, work_in
from lmcore.profiling.workload import Span, Step, Workload, no_span

INFERENCE, TRAINING = "inference", "training step"
"""Outermost ranges of what is recorded, one for each pass or step; the device has done its work when they end."""

TORCH_RECORD = "profile.json.gz"
"""Name of torch.profiler's record, for Perfetto, chrome://tracing and `read_torch_trace`."""

TOP_KERNELS = 25


def profile_workload(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Profiles config.steps inference passes and training steps: a task of `lmcore.profiling.runner.run_cases`.

    config.mode says what a training step is; "forward" has none. With Nsight Systems on a CUDA device where it works,
    else with torch.profiler, in this process; `tool` says which, and the first of the `notes` why. Returns

    {"tool", "inference": S, "training": S | None, "notes": [sentence]}, with S of `summary`.

    A lack of memory comes out as torch.OutOfMemoryError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device, _ = select_device(config.device)
    notes, trace = [], None
    if device.type == "cuda":
        try:
            trace = profile_with_nsys(config, folder)
        except UserError as error:
            notes.append(f"Profiled with torch.profiler instead of Nsight Systems: {error}")
    else:
        only = ", which only launch the GPU's work" if device.type == "mps" else ""
        notes.append(f"Nsight Systems sees CUDA alone: torch.profiler timed the CPU's operators{only}.")
    if trace is None:
        profiler = torch.profiler.profile()
        run_passes(config, torch.profiler.record_function, profiler)
        profiler.export_chrome_trace(str(folder / TORCH_RECORD))
        trace = read_torch_trace(folder / TORCH_RECORD)
    if config.compile:
        notes.append("A compiled model has no ranges on its modules, only on its passes.")
    training = None if config.mode == "forward" else summary(trace, TRAINING)
    found = {"inference": summary(trace, INFERENCE), "training": training}
    return {"tool": trace.tool, **found, "notes": [*notes, *trace.notes]}


def run_passes(config: WorkloadConfig, span: Span, recording: AbstractContextManager) -> None:
    """Warm-ups, then inside `recording` config.steps inference passes and as many training steps (not for "forward").

    All warm-ups come first.
    """
    training = Workload(config)
    inference = copy.copy(training)  # the same model and batch
    inference.config = replace(config, mode="forward")
    passes = {INFERENCE: inference} if config.mode == "forward" else {INFERENCE: inference, TRAINING: training}
    # a compiled model has no modules left to see, and ranges would break its graph
    with annotated(training.model, no_span if config.compile else span):
        for workload in passes.values():
            repeat(workload.step, workload.device, config.warmup_steps, "warm-up", span)
        with recording:
            for name, workload in passes.items():
                repeat(workload.step, workload.device, config.steps, name, span)


def repeat(step: Step, device: torch.device, times: int, name: str, span: Span) -> None:
    """Steps in ranges of this name, each waited for."""
    synchronize(device)
    for _ in range(times):
        with span(name):
            step(span)
            synchronize(device)


def profile_with_nsys(config: WorkloadConfig, folder: Path) -> Trace:
    """The trace of the program under Nsight Systems. Raises `UserError` if that does not work, or the program fails."""
    nsys = find_nsys()
    settings, done, log = folder / "config.json", folder / "done", folder / "nsys.log"
    write_json(settings, to_dict(config))
    done.unlink(missing_ok=True)
    program = [sys.executable, "-m", "lmcore.profiling.nsys.profile", str(settings)]
    export = run_under_nsys(nsys, program, folder)
    require(done.exists(), f"The program under nsys ended before it was done ({last_words(log)}); see {log}.")
    return read_export(export)


def main(path: Path) -> None:
    """Runs the workload of a config file under the CUDA profiler's switch; a file "done" beside it tells the end."""
    config, on_cuda = from_dict(WorkloadConfig, read_json(path)), torch.cuda.is_available()
    recording = torch.cuda.profiler.profile() if on_cuda else contextlib.nullcontext()
    run_passes(config, torch.cuda.nvtx.range if on_cuda else no_span, recording)
    path.with_name("done").touch()


def summary(trace: Trace, top: str) -> dict[str, list[dict[str, Any]]]:
    """What one pass of those named `top` is made of, by path, such as `inference/forward/block */ffn`, blocks together,
    as are the modules of a list: `step/Encoder/layers[*]`.

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
