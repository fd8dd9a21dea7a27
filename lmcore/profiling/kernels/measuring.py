"""What the tasks of notebook 07 share: types, and the time and memory of a function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmcore.device import forget_memory, select_device
from lmcore.profiling.ceilings import Timer, ceilings
from lmcore.profiling.memory.recording import record_cpu
from lmcore.profiling.memory.snapshot import UNKNOWN
from lmcore.profiling.memory.timeline import bytes_by_state
from lmcore.profiling.workload import WorkloadConfig

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of activations by precision."""


def activation_dtype(config: WorkloadConfig) -> torch.dtype:
    """The type that a cell's precision gives to activations."""
    return DTYPES[config.precision]


def extra_bytes(function: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a call takes at a time, beside what was there before; None where nobody counts it (MPS).

    On a GPU by the allocator's counters, else by the CPU allocator's events; what the call returns is part of it.
    """
    function()  # compilation and workspaces are not the function's own
    if device.type == "cuda":
        forget_memory(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    history = record_cpu(lambda span: function(), (), sources=False)
    levels = bytes_by_state(history, (UNKNOWN,))[0]
    return int(levels.max() - levels[0])


def measure_ceilings(config: WorkloadConfig, folder: Path) -> dict[str, float]:
    """`lmcore.profiling.ceilings.ceilings` of the cell's precision: a task of `lmcore.profiling.cells.run_cells`."""
    return ceilings(select_device(config.device)[0], config.precision)


def measured(function: Callable[[], Any], device: torch.device, timer: Timer | None = None) -> dict[str, Any]:
    """Median `seconds` that a call keeps the device busy, and `extra_bytes`."""
    bytes_taken = extra_bytes(function, device)  # before the timer takes its buffer
    seconds, _ = (timer or Timer(device))(function)
    return {"seconds": seconds, "extra_bytes": bytes_taken}
