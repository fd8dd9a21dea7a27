"""Energy of a step, by the GPU's own counter, which NVML reads (nvmlDeviceGetTotalEnergyConsumption; from Volta on)."""

import ctypes
from collections.abc import Callable
from timeit import default_timer
from typing import Any

import torch

from lmcore.device import synchronize

SECONDS = 2.0
"""How long the steps of one measurement take together at the least: the counter moves every 20 to 100 ms."""


def energy_counter(device: torch.device) -> Callable[[], int] | None:
    """Reads the millijoules that a GPU has taken so far; None without CUDA, NVML or such a counter (MIG has none)."""
    if device.type != "cuda":
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # comes with the driver
    except OSError:
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()

    def read() -> int | None:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value

    missing = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) or read() is None
    return None if missing else read


def joules_per_step(step: Callable[[], Any], device: torch.device) -> float | None:
    """Joules that the GPU takes in a step, with idle power and other processes': the mean of `SECONDS` of steps, each
    waited for, between the first and the last at which the counter moved. None without a counter that moves."""
    if (counter := energy_counter(device)) is None:
        return None
    began, readings = default_timer(), [counter()]
    while default_timer() - began < SECONDS or len(readings) < 4:
        step()
        synchronize(device)
        readings.append(counter())
    moved = [number for number in range(1, len(readings)) if readings[number] != readings[number - 1]]
    if len(moved) < 2:
        return None
    return (readings[moved[-1]] - readings[moved[0]]) / 1e3 / (moved[-1] - moved[0])
