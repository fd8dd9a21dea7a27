"""Memory of one step: peaks, and every allocation with its category, stage and source (CS336 A2 section 1.1.6)."""

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lmcore.device import device_name, forget_memory, select_device
from lmcore.files import atomic_write
from lmcore.profiling.memory.categories import Marks, explained, standing_events, standing_storages
from lmcore.profiling.memory.events import record_cpu
from lmcore.profiling.memory.snapshot import History, Stage, counted_states, history_of, state_after
from lmcore.profiling.memory.summary import CATEGORIES, bytes_by_state, summary
from lmcore.profiling.workload import Span, Workload, WorkloadConfig

MAX_ENTRIES = 1_000_000
"""Events that a CUDA record holds, as in the handout; the first ones are lost when there are more."""

SNAPSHOT = "memory_snapshot.pickle"

CPU_NOTE = "The CPU's allocator was recorded, with torch.profiler: only CUDA's keeps a history of its own."
FULL_NOTE = "The record was full: its first events are lost, and what was alive then counts as there before."


def profile_memory(config: WorkloadConfig, folder: Path, keep_snapshot: bool = True) -> dict[str, Any]:
    """Records every allocation of one step of `config.passes` and says what the memory was for (a `run_cases` task).

    After the warm-up (at least one step, so that the optimizer's state exists) one step is recorded, from dropped
    gradients on: with the CUDA allocator's history on a GPU, else with torch.profiler's events of the CPU allocator.
    Bytes are those requested by tensors. Seconds are those of the host, which asks for memory ahead of the GPU's work.
    "Events" are allocations and frees; *state* k is after k events.

    {
      "tool": "torch.cuda memory history" | "torch.profiler, CPU allocator",
      "device": name of the chip, "passes": …, "precision": …,
      "sources": what `source` says: "source line" (CUDA) | "function and operator" (CPU),
      "truncated": the record was full and lost its beginning,
      "events": number of events, "seconds": length of the record,
      "before_bytes", "after_bytes", "peak_bytes": of the timeline; "peak_seconds", "peak_event": when,
      "peak_stage": "forward" | "loss" | "backward" | "optimizer" | None (between them),
      "torch_peak_bytes": torch.cuda.max_memory_allocated of the step (rounded up by the allocator); None on the CPU,
      "torch_requested_peak_bytes": the same of requested bytes, to hold `peak_bytes` against; None on the CPU,
      "reserved_peak_bytes": torch.cuda.max_memory_reserved; None on the CPU,
      "categories": ["parameters", "optimizer state", "other", "gradients", "activations", "temporary"],
      "before_by_category", "peak_by_category", "after_by_category": {category: bytes},
      "stages": [{"name", "start", "end" (seconds), "first_event", "last_event",
                  "start_bytes", "end_bytes", "peak_bytes", "peak_by_category"}],
      "timeline": {"seconds": […], "event": […], "bytes": {category: […]}},   # ≤ 2,000 points; a value holds until
          # the next point; the peak of the whole and of each stage is among the points
      "largest": [{"bytes", "count", "total_bytes", "category", "stage", "source", "seconds", "kept"}],   # top 25 made
          # in the step, same (bytes, category, stage, source) together, by bytes and then count; seconds: median
          # lifetime, up to the end of the record for what stays; kept: how many stay
      "standing": the same for what was there before the step, top 25 (stage None, layers as "layers.*"),
      "allocations": [{"bytes", "start", "end" (seconds), "first_event", "last_event", "category", "stage", "source"}],
          # rectangles for drawing: what was there all the time as one per category (source: "… (n allocations)"), then
          # the 600 largest others, by beginning
      "allocations_total": number of allocations in the record, "allocations_smallest_bytes": smallest one listed,
      "snapshot": {"file": name in `folder`, "bytes": size} | None,
      "notes": [sentences],
    }

    Categories: "parameters" and "optimizer state" are the storages of the model's parameters and the optimizer's
    tensors; "other" is what else was there before (the batch, buffers); "gradients" what the parameters' gradients lie
    in when the backward pass ends; "activations" what forward and loss allocate and is alive when the backward pass
    begins (so none in inference); "temporary" everything else. Sources of storages with a name are that name
    ("layers.0.ffn.w1.weight", "gradient of …", "m of …", "inputs"); half-precision copies of weights, which autocast
    makes, are activations if they live until the backward pass, and named "bfloat16 copy of …, " before the line.
    """
    workload, notes = prepared(config)
    standing = standing_storages(workload)
    marks = Marks(workload)
    recorded: dict[str, Any] = {}
    if workload.device.type == "cuda":
        history, recorded = record_cuda(workload, marks, folder if keep_snapshot else None)
    else:
        history = record_cpu(lambda span: workload.step(both(span, marks.span)), standing_events(standing))
    history = explained(history, standing, marks.gradients, marks.copies)
    notes += [FULL_NOTE] if history.truncated else []
    return about(workload) | summary(history) | recorded | {"notes": notes}


def profile_memory_without_snapshot(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`profile_memory` that leaves no pickle behind, which can be hundreds of megabytes."""
    return profile_memory(config, folder, keep_snapshot=False)


def peak_memory(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Peak of one step of `config.passes`, after the warm-up, without a history (a `run_cases` task). Bytes.

    Keys: tool, device, passes, precision; before_bytes (parameters, optimizer state, batch); peak_bytes (on a GPU
    torch.cuda.max_memory_allocated, which counts what the allocator rounded up to; on the CPU the highest sum of
    requested bytes); step_bytes, their difference; requested_peak_bytes; reserved_peak_bytes (None on the CPU); notes.
    """
    workload, notes = prepared(config)
    if workload.device.type == "cuda":
        forget_memory(workload.device)
        before = torch.cuda.memory_allocated(workload.device)
        workload.step()
        workload.synchronize()
        peaks = cuda_peaks(workload.device)
        tool, peak = "torch.cuda.max_memory_allocated", peaks["torch_peak_bytes"]
        requested, reserved = peaks["torch_requested_peak_bytes"], peaks["reserved_peak_bytes"]
    else:
        standing = standing_storages(workload)
        history = record_cpu(workload.step, standing_events(standing), sources=False)
        total = bytes_by_state(explained(history, standing, {}, {}), CATEGORIES).sum(axis=0)
        tool, before, peak, reserved = history.tool, int(total[0]), int(total.max()), None
        requested = peak
    return about(workload) | {
        "tool": tool,
        "before_bytes": before,
        "peak_bytes": peak,
        "step_bytes": peak - before,
        "requested_peak_bytes": requested,
        "reserved_peak_bytes": reserved,
        "notes": notes,
    }


def prepared(config: WorkloadConfig) -> tuple[Workload, list[str]]:
    """The workload after its warm-up, without gradients, on a device whose allocator can be watched; and notes.

    There is at least one warm-up step, and as many more as the optimizer needs to have its state: with loss scaling
    the first steps may be skipped.
    """
    device, _ = select_device(config.device)
    notes = [] if device.type == "cuda" else [CPU_NOTE]
    workload = Workload(dataclasses.replace(config, device=str(device) if device.type == "cuda" else "cpu"))
    for _ in range(max(1, config.warmup_steps)):
        workload.step()
    for _ in range(20):
        if config.passes != "train_step" or workload.optimizer.state:
            break
        workload.step()
    workload.optimizer.zero_grad(set_to_none=True)
    workload.synchronize()
    return workload, notes


def about(workload: Workload) -> dict[str, Any]:
    """What was measured where, for the result."""
    config, device = workload.config, workload.device
    return {
        "device": device_name(device),
        "passes": config.passes,
        "precision": config.precision,
        "sources": "source line" if device.type == "cuda" else "function and operator",
        "torch_peak_bytes": None,
        "torch_requested_peak_bytes": None,
        "reserved_peak_bytes": None,
        "snapshot": None,
    }


def record_cuda(workload: Workload, marks: Marks, folder: Path | None) -> tuple[History, dict[str, Any]]:
    """The CUDA allocator's history of one step with its stages, the allocator's own peaks, and the pickle's name.

    Stages begin and end at numbers of allocations and frees, which the allocator counts: no clock is compared.
    """
    device = workload.device
    forget_memory(device)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)
    try:
        counts: list[tuple[str, tuple[int, int], tuple[int, int]]] = []

        @contextlib.contextmanager
        def counting(name: str) -> Iterator[None]:
            begin = cuda_counts(device)
            yield
            counts.append((name, begin, cuda_counts(device)))

        begin = cuda_counts(device)
        held = workload.step(both(counting, marks.span))
        workload.synchronize()
        end = cuda_counts(device)
        peaks = cuda_peaks(device)
        snapshot = torch.cuda.memory._snapshot()
        del held
    finally:
        torch.cuda.memory._record_memory_history(None)
    index = device.index or 0
    history = history_of(snapshot, index)
    told = counted_states(snapshot["device_traces"][index])
    stages = [
        Stage(name, *(state_after(end[0] - moment[0], end[1] - moment[1], told) for moment in (first, last)))
        for name, first, last in counts
    ]
    truncated = len(told[0]) < end[0] - begin[0]
    history = dataclasses.replace(history, stages=tuple(stages), truncated=truncated)
    return history, peaks | {"snapshot": write_snapshot(snapshot, folder) if folder else None}


def cuda_counts(device: torch.device) -> tuple[int, int]:
    """Allocations made and frees asked for on a GPU so far."""
    counted = torch.cuda.memory_stats(device)
    return counted["allocation.all.allocated"], counted["allocation.all.freed"]


def cuda_peaks(device: torch.device) -> dict[str, int]:
    """The allocator's own peaks since they were last reset."""
    return {
        "torch_peak_bytes": torch.cuda.max_memory_allocated(device),
        "torch_requested_peak_bytes": torch.cuda.memory_stats(device)["requested_bytes.all.peak"],
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
    }


def write_snapshot(snapshot: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Writes the pickle for pytorch.org/memory_viz; its name and size."""
    path = Path(folder) / SNAPSHOT
    with atomic_write(path) as file:
        pickle.dump(snapshot, file)
    return {"file": SNAPSHOT, "bytes": path.stat().st_size}


def both(outer: Span, inner: Span) -> Span:
    """A span that is two: what `inner` does when a part ends is still inside `outer`."""

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        with outer(name), inner(name):
            yield

    return span
