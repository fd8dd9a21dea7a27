"""What a model's passes are made of: kernels, kinds and idle time by range (CS336 A2 nsys_profile): a cell's task."""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lmcore.config import to_dict
from lmcore.device import select_device
from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.profiling.nsys.export import read_export
from lmcore.profiling.nsys.kinds import KINDS
from lmcore.profiling.nsys.nvtx import ATTENTION_PARTS, spans
from lmcore.profiling.nsys.program import INFERENCE, OUTCOME_FILE, TRAINING, run_passes
from lmcore.profiling.nsys.tool import find_nsys, last_words, run_under_nsys
from lmcore.profiling.nsys.torch_trace import record_trace
from lmcore.profiling.nsys.trace import Trace, busy_table, device_copies, inside, instances, kernel_table
from lmcore.profiling.workload import WorkloadConfig

TOP_KERNELS = 25
TIMELINE_PIECES = 1500
"""Roughly how many pieces the timeline of one pass is drawn with."""

ATTENTION_RANGES = ("attention", "scaled dot product attention", *ATTENTION_PARTS)


def profile_workload(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Profiles config.steps inference passes and training steps: a task of `lmcore.profiling.cells.run_cells`.

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
        on = {
            "cpu": "the CPU's operators were",
            "mps": "the launching of operators on the CPU, not the GPU's work, was",
        }
        notes.append(f"Nsight Systems sees CUDA alone: {on[device.type]} timed by torch.profiler.")
        trace, outcome = profile_with_torch(config, folder, cuda=False)
    if config.compile:
        notes.append("A compiled model has no ranges on its modules, only on its passes.")
    parts = {"inference": INFERENCE, "training": TRAINING}
    there = {part: any(trace.ranges["path"] == name) for part, name in parts.items()}
    there["training"] &= outcome["training_outcome"] == "complete"
    return {
        "tool": trace.tool,
        **{part: summary(trace, name) if there[part] else None for part, name in parts.items()},
        **outcome,
        "attention": {part: attention_parts(trace, name) if there[part] else None for part, name in parts.items()},
        "timeline": {part: timeline(trace, name) if there[part] else None for part, name in parts.items()},
        "notes": notes,
    }


def profile_with_nsys(config: WorkloadConfig, folder: Path) -> tuple[Trace, dict[str, Any]]:
    """The trace and the training's outcome, from the program under Nsight Systems.

    Raises `UserError` if that does not work, and torch.OutOfMemoryError if the inference does not fit.
    """
    nsys = find_nsys()
    settings, outcome_file = folder / "config.json", folder / OUTCOME_FILE
    write_json(settings, to_dict(config))
    outcome_file.unlink(missing_ok=True)
    program = [sys.executable, "-m", "lmcore.profiling.nsys.program", str(settings)]
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


def profile_with_torch(config: WorkloadConfig, folder: Path, cuda: bool) -> tuple[Trace, dict[str, Any]]:
    """The trace and the training's outcome, by torch.profiler in this process."""
    span = spans("torch")
    return record_trace(lambda profiler: run_passes(config, span, profiler), folder / "profile.json.gz", cuda)


def folded(path: str) -> str:
    """A path with all blocks as one: "inference/forward/block */ffn"."""
    return re.sub(r"\bblock \d+", "block *", path)


def summary(trace: Trace, top: str) -> dict[str, Any]:
    """Every range of the passes named `top`, blocks together, by path: {"passes": number, "ranges": {path: {…}}}.

    Of each: instances, of all passes together; the medians over instances of seconds, gpu_seconds, busy_seconds and
    idle_seconds (`busy_table`); kinds, rows {kind, calls, total_seconds, share} per instance (medians); kernels, the
    first rows of `kernel_table`, where calls and total_seconds are of all instances together.
    """
    paths = trace.ranges["path"]
    paths = paths[(paths == top) | paths.str.startswith(f"{top}/")]
    return {
        "passes": int((paths == top).sum()),
        "ranges": {path: range_summary(trace, path) for path in dict.fromkeys(map(folded, paths))},
    }


def range_summary(trace: Trace, path: str) -> dict[str, Any]:
    """The entry of one (folded) path in `summary`."""
    busy = busy_table(trace, path)
    medians = busy.drop(columns=["instance", "path"]).median().to_dict()
    kinds = kinds_per_instance(trace, instances(trace, path))
    kernels = kernel_table(trace, path).head(TOP_KERNELS)
    return {"instances": len(busy), **medians, "kinds": kinds, "kernels": kernels.to_dict("records")}


def kinds_per_instance(trace: Trace, chosen: pd.DataFrame) -> list[dict[str, Any]]:
    """Calls and seconds of each kind in one of the chosen ranges: medians over them, absent kinds counting as 0."""
    work = pd.concat([inside(trace.kernels, chosen), device_copies(inside(trace.copies, chosen))])
    by_instance = work.groupby(["instance", "kind"])["duration"].agg(["size", "sum"])
    every = pd.MultiIndex.from_product([chosen["id"], work["kind"].unique()], names=["instance", "kind"])
    medians = by_instance.reindex(every, fill_value=0).groupby("kind").median()
    whole = medians["sum"].sum()
    return [
        {
            "kind": kind,
            "calls": float(medians["size"][kind]),
            "total_seconds": float(medians["sum"][kind]) / 1e9,
            "share": float(medians["sum"][kind] / whole) if whole else 0.0,
        }
        for kind in KINDS
        if kind in medians.index
    ]


def attention_parts(trace: Trace, top: str) -> dict[str, dict[str, Any]]:
    """The parts of attention in one pass's forward ranges, all blocks together.

    By name ("computing softmax", …): instances_per_pass, and per pass (means) seconds, gpu_seconds, busy_seconds, and
    kinds: {kind: seconds}. A part without ranges, as with compilation, is absent.
    """
    passes = int((trace.ranges["path"] == top).sum())
    found = {}
    for part in ATTENTION_RANGES:
        middle = "" if part == "attention" else "scaled dot product attention/" * (part in ATTENTION_PARTS)
        path = f"{top}/forward/block */" + (part if part == "attention" else f"attention/{middle}{part}")
        with contextlib.suppress(UserError):
            chosen = instances(trace, path)
            busy = busy_table(trace, path)[["seconds", "gpu_seconds", "busy_seconds"]].sum() / passes
            kinds = inside(trace.kernels, chosen).groupby("kind")["duration"].sum() / 1e9 / passes
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
    kernels, copies = inside(trace.kernels, chosen), device_copies(inside(trace.copies, chosen))
    copies = copies.assign(stream=-1)
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
            last["end"] = max(last["end"], int(row.end))
            last["busy"] += int(row.duration)
            last["count"] += 1
            continue
        piece = {"start": int(row.start), "end": int(row.end), "busy": int(row.duration)}
        latest[row.stream] = piece | {"kind": row.kind, "stream": int(row.stream), "count": 1}
        joined.append(latest[row.stream])
    times = ("start", "end")
    seconds = [{key: (piece[key] - begin) / 1e9 for key in times} | {"busy": piece["busy"] / 1e9} for piece in joined]
    return [piece | second for piece, second in zip(joined, seconds, strict=True)]
