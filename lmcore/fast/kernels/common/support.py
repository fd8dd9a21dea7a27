"""Which of the kernels this machine can run, and where."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

HOPPER = (9, 0)
"""CUDA compute capability of the H100 and H200."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed: the CUDA build of PyTorch brings it on Linux."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device; elsewhere the reference implementations do."""
    return device.type == "cuda" and torch.version.hip is None and has_triton()


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether Triton runs here on what Hopper's own instructions need (TMA, warpgroup matmuls).

    AMD's chips have capabilities of their own, some of them the same number.
    """
    return runs_triton(device) and torch.cuda.get_device_capability(device) == HOPPER


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the CUDA device of `x` the current one, which is where Triton launches its kernels, whatever they are
    given. Nothing for other devices."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
