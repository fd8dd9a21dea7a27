"""What makes a run repeat itself: seeds, deterministic algorithms, and the states of random generators."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lmcore.config import TrainConfig
from lmcore.device import set_matmul_precision


@contextmanager
def reproducible(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Seeds PyTorch and sets precision and determinism as configured; puts the process's settings back afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    torch.manual_seed(config.seed)
    set_matmul_precision(device, config.precision)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for to repeat itself
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of the generators that training draws from: dropout's on CPU and device (batches depend on the step)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_rng_state(device: torch.device, states: dict[str, Tensor]) -> None:
    """Restores what `rng_state` gave; a run that moved to another kind of device keeps that device's own state."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])
