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

RUNGS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("the definition, operation by operation", {}),
    "sdpa": ("PyTorch's fused attention", {"attention": "sdpa"}),
    "flash": ("our FlashAttention-2", {"attention": "flash"}),
    "compiled": ("torch.compile of the model", {"attention": "flash", "compile": True}),
    "fused": ("our explicit step, kernel by kernel", {"attention": "flash", "ops": "fused"}),
    "graph": ("the same as one CUDA graph", {"attention": "flash", "ops": "fused"}),
}
"""What each adds, and the switches of its benchmark case."""

NO_GRAPH = "A CUDA graph needs a CUDA GPU; elsewhere the explicit step runs operation by operation, as the rung before."
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


def rung_cases(size: str, context_length: int, **changes: Any) -> dict[str, WorkloadConfig]:
    """The benchmark case of every rung: a whole training step of a named size."""
    return {
        rung: workload_config(size, context_length, passes="train_step", **changes, **switches)
        for rung, (_, switches) in RUNGS.items()
    }


def absent_rungs(compiled: bool, device: torch.device | None = None) -> dict[str, str]:
    """The rungs that cannot be measured here, and why."""
    device = device or select_device()[0]
    absent = {} if compiled else {"compiled": NO_COMPILER}
    return absent if device.type == "cuda" else absent | {"graph": NO_GRAPH}


def task_of(rung: str) -> Callable[[WorkloadConfig, Path], dict[str, Any]]:
    """What measures the rung."""
    return measure_ungraphed if rung == "fused" else timing.measure


def ladder_table(records: Mapping[str, Mapping[str, Any]], absent: Mapping[str, str]) -> pd.DataFrame:
    """A row for each rung, in order: seconds of a step and peak memory as measured, or why it was not."""
    timings = {row["cell"]: row for row in timing.timing_table(records).to_dict("records")} if records else {}
    rows = [
        {"rung": rung, "what": what} | timings.get(rung, {"outcome": "absent", "reason": absent.get(rung)})
        for rung, (what, _) in RUNGS.items()
        if rung in timings or rung in absent
    ]
    return pd.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], columns=COLUMNS)


COLUMNS = [
    "rung", "what", "outcome", "reason", "size", "batch_size", "context_length", "precision", "wall_median",
    "wall_std", "tokens_per_second", "mfu", "peak_memory_bytes", "device",
]  # fmt: skip
