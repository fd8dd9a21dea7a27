"""Energy of a step, by the GPU's own counter, which NVML reads (nvmlDeviceGetTotalEnergyConsumption; from Volta on)."""

import math
from collections.abc import Callable
from typing import Any

import torch

from lmcore.device import synchronize

SECONDS = 2.0
"""How long the steps of one measurement take together: the counter moves every 20 to 100 ms."""

MOST_POLLS = 10_000
"""Steps after which a counter that has not moved is given up."""


def energy_counter(device: torch.device) -> Callable[[], int] | None:
    """What reads the millijoules that a GPU has taken so far; None without CUDA, nvidia-ml-py or a counter (MIG)."""
    try:
        import pynvml
    except ImportError:
        return None
    if device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def joules_per_step(step: Callable[[], Any], device: torch.device, seconds: float) -> float | None:
    """Joules that the GPU takes in one step of about so many `seconds`, idle power and other processes' included.

    Mean over `SECONDS` of steps, between two moments at which the counter moves; None without a counter that does.
    """
    if (counter := energy_counter(device)) is None:
        return None

    def steps_until_it_moves() -> int:
        synchronize(device)
        before, steps = counter(), 0
        while counter() == before and steps < MOST_POLLS:
            step()
            synchronize(device)
            steps += 1
        return steps

    steps_until_it_moves()
    begin, steps = counter(), math.ceil(SECONDS / seconds)
    for _ in range(steps):
        step()
    steps += steps_until_it_moves()
    return (counter() - begin) / 1e3 / steps or None
