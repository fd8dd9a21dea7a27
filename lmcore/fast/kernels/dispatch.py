"""Which of the kernels this machine can run, and where."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed: the CUDA build of PyTorch brings it on Linux."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device; elsewhere the reference implementations do."""
    return device.type == "cuda" and torch.version.hip is None and has_triton()


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether Triton runs here on what Hopper's own instructions need (TMA, warpgroup matmuls): on an H100 or H200.

    AMD's chips have capabilities of their own, some of them the same number.
    """
    return device.type == "cuda" and runs_triton(device) and torch.cuda.get_device_capability(device) == (9, 0)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the CUDA device of `x` the current one, which is where Triton launches its kernels, whatever they are
    given. Nothing for other devices."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def by_triton(reference: Callable[..., Any]) -> Callable[..., Any]:
    """`reference`, in whose place the function of its name in its package's module `gpu` runs where Triton does.

    The first argument's device decides. Tensors of float64 are left to the reference implementation.
    """

    @wraps(reference)
    def call(x: Tensor, *arguments: Any, **options: Any) -> Any:
        if x.dtype == torch.float64 or not runs_triton(x.device):
            return reference(x, *arguments, **options)
        gpu = importlib.import_module(f"{reference.__module__}.gpu")
        with on_device_of(x):
            return getattr(gpu, reference.__name__)(x, *arguments, **options)

    return call
