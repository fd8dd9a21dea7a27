"""Memory of one step: peaks, and every allocation with its category, stage and source (CS336 A2 section 1.1.6)."""

from pathlib import Path
from typing import Any

from lmcore.profiling.workload import WorkloadConfig


def profile_memory(config: WorkloadConfig, folder: Path, keep_snapshot: bool = True) -> dict[str, Any]:
    """Records every allocation of one step of `config.passes` and says what the memory was for (a `run_cells` task).

    After the warm-up (at least one step, so that the optimizer's state exists) one step is recorded, from dropped
    gradients on: with the CUDA allocator's history on a GPU, else with torch.profiler's events of the CPU allocator.
    Bytes are those requested by tensors. "Events" are allocations and frees; *state* k is after k events.

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
      "timeline": {"seconds": […], "event": […], "bytes": {category: […]}},   # ≤ 2,000 points, step-wise: a value holds
          # until the next point; the peak of the whole and of each stage is among the points
      "largest": [{"bytes", "count", "total_bytes", "category", "stage", "source", "seconds", "kept"}],   # top 25 made in
          # the step, same (bytes, category, stage, source) together, by bytes and then count; seconds: median lifetime,
          # up to the end of the record for what stays; kept: how many stay
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
    raise NotImplementedError
