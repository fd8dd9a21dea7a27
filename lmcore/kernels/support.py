"""Which of the kernels this machine can run."""

import importlib.util
from functools import lru_cache

import torch

HOPPER = (9, 0)
"""CUDA compute capability of the H100 and H200."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed: the CUDA build of PyTorch brings it on Linux."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device; elsewhere their plain twins do."""
    return device.type == "cuda" and torch.version.hip is None and has_triton()


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether the device has what Hopper's own instructions need (TMA, warpgroup matrix products)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
