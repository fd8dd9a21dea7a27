"""What a model's passes are made of: kernels, kinds and idle time by range (CS336 A2 nsys_profile): a cell's task.

`python -m lmcore.profiling.nsys.profile config.json` is the program that Nsight Systems watches: it cannot look into a
notebook.
"""

import contextlib
import copy
import gc
import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from lmcore.config import from_dict, to_dict
from lmcore.device import out_of_memory_reason, select_device
from lmcore.errors import EXIT_CODES, EXIT_USER_ERROR, UserError, require
from lmcore.files import read_json, write_json
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.kinds import KINDS
from lmcore.profiling.nsys.nvtx import ATTENTION_PARTS, annotated, nvtx_span
from lmcore.profiling.nsys.tool import find_nsys, last_words, run_under_nsys
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import Trace, busy_table, inside, instances, kernel_table, unattributed, work_in
from lmcore.profiling.workload import Span, Workload, WorkloadConfig, no_span, require_memory

INFERENCE, TRAINING = "inference", "training step"
TOPS = {"inference": INFERENCE, "training": TRAINING}
"""Outermost ranges of what is recorded, one for each pass or step; the device has done its work when they end."""

TOP_KERNELS = 25
TIMELINE_PIECES = 1500
"""Roughly how many pieces the timeline of one pass is drawn with."""

ATTENTION_RANGES = ("attention", "scaled dot product attention", *ATTENTION_PARTS)


def profile_workload(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Profiles config.steps inference passes and training steps: a task of `lmcore.profiling.runner.run_cases`.

    config.passes says what a training step is; "forward" has none. With Nsight Systems on a CUDA device where it works,
    else with torch.profiler, in this process; `tool` says which, and the first of the `notes` why. Returns

    {"tool", "inference": S, "training": S | None, "training_outcome": None | "complete" | "out of memory",
     "training_reason", "attention": {"inference": A, "training": A | None}, "timeline": {"inference": T, "training":
     T | None}, "notes": [sentence]}, with S of `summary`, A of `attention_parts` and T of `timeline`.

    A lack of memory in inference comes out as torch.OutOfMemoryError.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    device, _ = select_device(config.device)
    notes: list[str] = []
    if device.type == "cuda":
        try:
            trace, outcome = profile_with_nsys(config, folder)
        except UserError as error:
            notes.append(f"Profiled with torch.profiler instead of Nsight Systems: {error}")
            trace, outcome = profile_with_torch(config, folder, cuda=True)
    else:
        on_mps = "the launching of operators on the CPU, not the GPU's work, was"
        timed = on_mps if device.type == "mps" else "the CPU's operators were"
        notes.append(f"Nsight Systems sees CUDA alone: {timed} timed by torch.profiler.")
        trace, outcome = profile_with_torch(config, folder, cuda=False)
    if config.compile:
        notes.append("A compiled model has no ranges on its modules, only on its passes.")
    if (lacking := unattributed(trace)) is not None:
        notes.append(lacking)
    there = {part: (trace.ranges["path"] == top).any() for part, top in TOPS.items()}
    there["training"] &= outcome["training_outcome"] == "complete"

    def of_each(read: Callable[[Trace, str], Any]) -> dict[str, Any]:
        return {part: read(trace, TOPS[part]) if there[part] else None for part in TOPS}

    whole = {"tool": trace.tool, **of_each(summary), **outcome}
    return whole | {"attention": of_each(attention_parts), "timeline": of_each(timeline), "notes": notes}


def run_passes(config: WorkloadConfig, span: Span, recording: AbstractContextManager) -> dict[str, Any]:
    """Warm-ups, then inside `recording` config.steps inference passes and as many training steps (not for "forward").

    All warm-ups come first. A lack of memory in training ends the training alone; in inference it is raised.
    Returns training_outcome (None, "complete" or "out of memory") and training_reason.
    """
    inference = Workload(replace(config, passes="forward"))
    training = copy.copy(inference)  # the same model and batch
    training.config = config
    outcome: dict[str, Any] = {"training_outcome": None, "training_reason": None}
    # a compiled model has no modules left to see, and ranges would break its graph
    with annotated(training.model, no_span if config.compile else span):
        repeat(inference, config.warmup_steps, "warm-up", span)
        if config.passes != "forward":
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

    Raises `UserError` if that does not work, and torch.OutOfMemoryError if the inference does not fit.
    """
    nsys = find_nsys()
    settings, outcome_file = folder / "config.json", folder / "outcome.json"
    write_json(settings, to_dict(config))
    outcome_file.unlink(missing_ok=True)
    program = [sys.executable, "-m", "lmcore.profiling.nsys.profile", str(settings)]
    failure = None
    try:
        export = run_under_nsys(nsys, program, folder, graphs=config.compile)
    except UserError as error:
        failure = error
    outcome = read_json(outcome_file) if outcome_file.exists() else {"outcome": None}
    if outcome["outcome"] == "out of memory":
        raise torch.OutOfMemoryError(outcome["reason"])
    if failure is not None:
        raise failure
    log = folder / "nsys.log"
    require(
        outcome["outcome"] == "complete",
        f"The program under nsys ended before it was done ({last_words(log)}); see {log}.",
    )
    return read_export(export), {key: outcome.get(key) for key in ("training_outcome", "training_reason")}


def main(path: Path) -> int:
    """Runs the workload of a config file under the CUDA profiler's switch; outcome.json is written beside the file."""
    result: dict[str, Any] = {"outcome": "complete", "reason": None}
    try:
        config = from_dict(WorkloadConfig, read_json(path))
        on_cuda = torch.cuda.is_available()
        span = nvtx_span if on_cuda else no_span
        recording = torch.cuda.profiler.profile() if on_cuda else contextlib.nullcontext()
        result |= run_passes(config, span, recording)
    except UserError as error:
        print(f"lmcore: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        result |= {"outcome": "out of memory", "reason": reason}
    write_json(path.with_name("outcome.json"), result)
    print(json.dumps(result))
    return EXIT_CODES[result["outcome"]]


def profile_with_torch(config: WorkloadConfig, folder: Path, cuda: bool) -> tuple[Trace, dict[str, Any]]:
    """The trace and the training's outcome, by torch.profiler in this process.

    The record is kept as profile.json.gz, for Perfetto or chrome://tracing.
    """
    profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda)
    outcome = run_passes(config, torch.profiler.record_function, profiler)
    record = folder / "profile.json.gz"
    profiler.export_chrome_trace(str(record))
    return read_torch_trace(record), outcome


def summary(trace: Trace, top: str) -> dict[str, Any]:
    """Every range of the passes named `top`, blocks together, by path: {"passes": number, "ranges": {path: {…}}}.

    Of each path, such as "inference/forward/block */ffn": instances, of all passes together; the medians over instances
    of seconds, gpu_seconds, busy_seconds and idle_seconds (`busy_table`); kinds, rows {kind, calls, total_seconds,
    share} per instance (medians); kernels, the first rows of `kernel_table`, where calls and total_seconds are of all
    instances together.
    """
    paths = trace.ranges["path"]
    paths = paths[(paths == top) | paths.str.startswith(f"{top}/")]
    ranges = {}
    for path in dict.fromkeys(re.sub(r"\bblock \d+", "block *", path) for path in paths):
        busy = busy_table(trace, path)
        medians = busy.drop(columns=["instance", "path"]).median().to_dict()
        kernels = kernel_table(trace, path).head(TOP_KERNELS).to_dict("records")
        ranges[path] = {"instances": len(busy), **medians, "kinds": median_kinds(trace, path), "kernels": kernels}
    return {"passes": int((paths == top).sum()), "ranges": ranges}


def median_kinds(trace: Trace, path: str) -> list[dict[str, Any]]:
    """Calls and seconds of each kind in one of a path's ranges: medians over them, absent kinds counting as 0."""
    chosen, *work = work_in(trace, path, "process")
    together = pd.concat(part[["instance", "kind", "duration"]] for part in work)
    by_instance = together.groupby(["instance", "kind"], observed=True)["duration"].agg(["size", "sum"])
    kinds = [kind for kind in KINDS if (together["kind"] == kind).any()]
    every = pd.MultiIndex.from_product([chosen["id"], kinds], names=["instance", "kind"])
    medians = by_instance.reindex(every, fill_value=0).groupby("kind", sort=False).median() / [1, 1e9]
    table = medians.reset_index().rename(columns={"size": "calls", "sum": "total_seconds"})
    whole = table["total_seconds"].sum()
    return table.assign(share=table["total_seconds"] / whole if whole else 0.0).to_dict("records")


def attention_parts(trace: Trace, top: str) -> dict[str, dict[str, Any]]:
    """The parts of attention in one pass's forward ranges, all blocks together.

    By name ("computing softmax", …): instances_per_pass, and per pass (means) seconds, gpu_seconds, busy_seconds, and
    kinds: {kind: seconds}. A part without ranges, as with compilation, is absent.
    """
    passes = int((trace.ranges["path"] == top).sum())
    whole = f"{top}/forward/block */attention"
    inner = f"{whole}/scaled dot product attention"
    paths = [whole, inner, *(f"{inner}/{part}" for part in ATTENTION_PARTS)]
    found = {}
    for part, path in zip(ATTENTION_RANGES, paths, strict=True):
        with contextlib.suppress(UserError):
            chosen, kernels, _ = work_in(trace, path, "process")
            busy = busy_table(trace, path)[["seconds", "gpu_seconds", "busy_seconds"]].sum() / passes
            kinds = kernels.groupby("kind", observed=True)["duration"].sum() / 1e9 / passes
            found[part] = {"instances_per_pass": len(chosen) / passes, **busy.to_dict(), "kinds": kinds.to_dict()}
    return found


def timeline(trace: Trace, top: str) -> dict[str, Any]:
    """One pass, to be drawn: the one of median length; seconds are from its beginning.

    {"seconds": when its last work ended, "ranges": [{name, path, depth, start, end}] down to the blocks' parts,
    "work": [{start, end, busy, kind, stream, thread, count}]}: neighbours of one kind on one stream are one piece where
    the gap between them is too small to see; `busy` is the time in which the piece's work ran.
    """
    passes = instances(trace, top)
    middle = passes.iloc[(passes["end"] - passes["start"]).argsort().iloc[len(passes) // 2]]
    chosen = passes[passes["id"] == middle["id"]]
    kernels, copies = inside(trace.kernels, chosen), inside(trace.copies, chosen).assign(stream=-1)
    columns = ["start", "end", "kind", "stream", "duration"]
    work = pd.concat([kernels[columns], copies[columns]]).sort_values("start")
    begin, finish = int(middle["start"]), int(max([middle["end"], *work["end"]]))
    ranges = trace.ranges[(trace.ranges["start"] >= begin) & (trace.ranges["end"] <= int(middle["end"]))]
    ranges = ranges[ranges["path"].str.startswith(top)]
    relative = ranges.assign(start=(ranges["start"] - begin) / 1e9, end=(ranges["end"] - begin) / 1e9)
    return {
        "seconds": (finish - begin) / 1e9,
        "ranges": relative[["name", "path", "depth", "start", "end"]].to_dict("records"),
        "work": pieces(work, begin, (finish - begin) / TIMELINE_PIECES),
    }


def pieces(work: pd.DataFrame, begin: int, gap: float) -> list[dict[str, Any]]:
    """Kernels and copies in order, neighbours of one kind and stream joined over gaps up to `gap` nanoseconds."""
    joined: list[dict[str, Any]] = []
    latest: dict[int, dict[str, Any]] = {}
    for row in work.itertuples(index=False):
        last = latest.get(row.stream)
        if last is not None and last["kind"] == row.kind and row.start - last["end"] <= gap:
            last["end"] = max(last["end"], row.end)
            last["busy"] += row.duration
            last["count"] += 1
        else:
            piece = {"start": row.start, "end": row.end, "busy": row.duration, "kind": row.kind, "stream": row.stream}
            latest[row.stream] = piece | {"count": 1}
            joined.append(latest[row.stream])
    return [
        piece
        | {"start": (piece["start"] - begin) / 1e9, "end": (piece["end"] - begin) / 1e9, "busy": piece["busy"] / 1e9}
        for piece in joined
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
