"""Which device computes: its precision, peak, memory and threads, and what makes a run on it repeat itself."""

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

from lmcore.config import TrainConfig
from lmcore.errors import UserError, require

PEAK_FLOPS: dict[str, dict[str, float]] = {
    # Dense FLOP/s from the vendor's data sheets, without sparsity; fp32 is the non-tensor-core rate.
    "H200": {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12},
    "H100": {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12},
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    "L40S": {"fp32": 91.6e12, "tf32": 183.2e12, "bf16": 362e12, "fp16": 362e12},
    "RTX 4090": {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12},
    "Quadro RTX 6000": {"fp32": 16.3e12, "fp16": 130.5e12},
}
"""Peak dense FLOP/s by chip and precision. An unknown chip has no entry, and then no MFU is reported."""

VARIANTS_WITH_OTHER_PEAKS = re.compile(r"PCIe|NVL|MIG|Laptop|4090 D|\b6000 Ada\b", re.IGNORECASE)


def select_device(name: str = "auto") -> tuple[torch.device, str]:
    """The device to use and the reason in words. `auto` takes cuda, then mps, then cpu; "cuda:1" and the like work.

    Raises `UserError` when the named device is not there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    if name == "auto":
        if gpus:
            return torch.device("cuda"), f"a CUDA GPU is available ({torch.cuda.get_device_name()})"
        if mps:
            return torch.device("mps"), "no CUDA GPU, but Apple's Metal is available"
        return torch.device("cpu"), "neither a CUDA GPU nor Apple's Metal is available"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"There is no device {name!r}; use auto, cpu, mps, cuda or cuda:N.") from None
    there = {"cpu": 1, "cuda": gpus, "mps": int(mps)}.get(device.type, 0)
    machine = f"this machine shows {gpus} CUDA GPUs and {'' if mps else 'no '}Apple Metal"
    require((device.index or 0) < there, f"Device {name!r} is not there: {machine}; use auto or cpu.")
    return device, "it was asked for"


def device_name(device: torch.device) -> str:
    """The chip's name, for tables: the GPU's own, or "CPU" or "Apple Metal"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"cpu": "CPU", "mps": "Apple Metal"}[device.type]


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The context for forward passes: mixed precision for bf16 and fp16, nothing for fp32 and tf32."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtypes[precision])


def require_precision(device: torch.device, precision: str) -> None:
    """Raises `UserError` unless the device computes in this precision."""
    try:
        with autocast(device, precision):
            torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
    except RuntimeError as error:
        unsupported = f"{device.type} does not compute in {precision} ({str(error).splitlines()[0]})"
        raise UserError(f"{unsupported}; choose another --precision or --device.") from None


def set_matmul_precision(device: torch.device, precision: str) -> None:
    """Lets float32 matmuls use TF32 on CUDA for every precision but fp32. MPS is left alone: it trains wrongly then."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def peak_flops(chip: str, precision: str) -> float | None:
    """Peak dense FLOP/s of the chip with this name in this precision, or None when it is not known for certain."""
    if VARIANTS_WITH_OTHER_PEAKS.search(chip):
        return None
    return next((peaks.get(precision) for name, peaks in PEAK_FLOPS.items() if name in chip), None)


def out_of_memory_reason(error: Exception) -> str | None:
    """What `error` says if it is a lack of memory, on a device or the host, else None.

    Only CUDA has an exception of its own; Metal and PyTorch's allocator for the CPU raise a plain RuntimeError.
    """
    reason = str(error).partition("\n")[0]
    plain = isinstance(error, RuntimeError) and re.search("MPS backend out of memory|DefaultCPUAllocator", reason)
    return reason if plain or isinstance(error, torch.OutOfMemoryError | MemoryError) else None


def reset_peak_memory(device: torch.device) -> None:
    """Returns what earlier work in this process no longer uses, and starts the record of peak memory anew."""
    if device.type == "cuda":
        gc.collect()  # what only a cycle still holds: on a CPU it goes by itself, and looking for it takes time
        torch.cuda.init()  # the record can only begin in a process that has begun with CUDA
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_bytes(device: torch.device) -> int | None:
    """All memory that work on this device could ever have, in use or not; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    memory = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # not in a container; "max" is no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory + psutil.swap_memory().total


def too_large(what: str, needed: int, parameters: int, batch_size: int, device: torch.device) -> str | None:
    """Why `what` ("Training"), which needs at least so many bytes, cannot fit into the device's memory; else None."""
    there = memory_bytes(device)
    if there is None or needed <= there:
        return None
    needs = f"{what} needs at least {needed / 1e9:,.1f} GB for {parameters:,} parameters and {batch_size} sequences"
    return f"{needs} a batch; {device_name(device)} has {there / 1e9:,.1f} GB: choose a smaller model or batch."


def enough_threads(config: TrainConfig) -> int:
    """How many threads the CPU's operations get: one for each 50 million FLOPs of a block's largest matmul.

    PyTorch's number at most. Small operations are slower with more, which wait for each other longer than they compute.
    """
    flops = 2 * config.tokens_per_step * config.model.d_model * config.model.d_ff
    return max(1, min(torch.get_num_threads(), flops // 50_000_000))


@contextlib.contextmanager
def reproducible(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Seeds PyTorch and sets precision, determinism and threads; puts the process's settings back afterwards."""
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    torch.manual_seed(config.seed)
    set_matmul_precision(device, config.precision)
    torch.set_num_threads(enough_threads(config) if device.type == "cpu" else threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for to repeat itself
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if config.deterministic:  # the call imports PyTorch's compiler, for seconds
            torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


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
