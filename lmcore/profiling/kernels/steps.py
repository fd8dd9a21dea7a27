"""Cumulative optimizations of a training step: from the eager model to one CUDA graph of our kernels."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.device import select_device
from lmcore.profiling import timing
from lmcore.profiling.workload import Span, Workload, WorkloadConfig, no_span, workload_config

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("the reference implementation, operation by operation", {}),
    "sdpa": ("PyTorch's fused attention", {"attention": "sdpa"}),
    "flash": ("our FlashAttention-2", {"attention": "flash"}),
    "compiled": ("torch.compile of the model", {"attention": "flash", "compile": True}),
    "fused": ("our explicit step, kernel by kernel", {"attention": "flash", "ops": "fused"}),
    "graph": ("the same as one CUDA graph", {"attention": "flash", "ops": "fused"}),
}
"""What each adds, and the switches of its benchmark case."""

NO_GRAPH = (
    "A CUDA graph needs a CUDA GPU; elsewhere the explicit step runs operation by operation, as the variant before."
)
NO_COMPILER = "It was left out here (parameter `compiled`): compiling takes longer than all other measurements."


class Ungraphed(Workload):
    """The explicit step whose kernels are launched one by one."""

    def step(self, span: Span = no_span) -> Tensor:
        """Forward and backward pass, then the update. Returns the loss."""
        loss = self.fused.transformer.forward_backward(self.inputs, self.targets)
        self.optimizer.step()
        return loss


def measure_ungraphed(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`lmcore.profiling.timing.measure` of the explicit step without a CUDA graph (a task of `run_cases`)."""
    return timing.timed_steps(Ungraphed, config)


def step_cases(size: str, context_length: int, **changes: Any) -> dict[str, WorkloadConfig]:
    """The benchmark case of every variant: a whole training step of a named size."""
    return {
        variant: workload_config(size, context_length, mode="train_step", **changes, **switches)
        for variant, (_, switches) in VARIANTS.items()
    }


def absent_variants(compiled: bool, device: torch.device | None = None) -> dict[str, str]:
    """The variants that cannot be measured here, and why."""
    device = device or select_device()[0]
    absent = {} if compiled else {"compiled": NO_COMPILER}
    return absent if device.type == "cuda" else absent | {"graph": NO_GRAPH}


def task_of(variant: str) -> Callable[[WorkloadConfig, Path], dict[str, Any]]:
    """What measures the variant."""
    return measure_ungraphed if variant == "fused" else timing.measure


def steps_table(records: Mapping[str, Mapping[str, Any]], absent: Mapping[str, str]) -> pd.DataFrame:
    """A row for each variant, in order: seconds of a step and peak memory as measured, or why it was not."""
    timings = {row["case"]: row for row in timing.timing_table(records).to_dict("records")} if records else {}
    rows = [
        {"variant": variant, "what": what} | timings.get(variant, {"outcome": "absent", "reason": absent.get(variant)})
        for variant, (what, _) in VARIANTS.items()
        if variant in timings or variant in absent
    ]
    return pd.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], columns=COLUMNS)


COLUMNS = [
    "variant", "what", "outcome", "reason", "size", "batch_size", "context_length", "precision", "processes",
    "wall_median", "wall_std", "wall_spread", "busy_median", "busy_spread", "host_bound", "tokens_per_second", "mfu",
    "peak_memory_bytes", "peak_reserved_bytes", "device",
]  # fmt: skip
