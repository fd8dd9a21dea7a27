"""Which measurements arithmetic forbids: of less memory than a step holds, or of more than the peak rate."""

import statistics
from collections.abc import Mapping
from typing import Any

from lmcore.accounting import forward_flops_by_component, least_step_bytes, num_parameters
from lmcore.config import replace
from lmcore.device import peak_flops
from lmcore.profiling.cases import MODES, WorkloadConfig


def least_bytes(config: WorkloadConfig, shared_by: int | None = None) -> int:
    """Bytes that a step of the case holds at the least at some moment.

    With `shared_by`, so many ranks divide the state or parts of it. Gradients then do not count: some ways reduce them
    one by one.
    """
    whole = least_step_bytes(replace(config, steps=config.warmup_steps + config.steps), config.mode)
    parameters = num_parameters(config.model)
    return whole if shared_by is None else whole - 16 * parameters + 12 * parameters // shared_by


def least_flops(config: WorkloadConfig) -> int:
    """Matmul FLOPs that a step computes at the least: a kernel need not compute what the causal mask takes away."""
    flops = forward_flops_by_component(config.model, config.batch_size)
    masked = (flops["scores"] + flops["weighted_sum"]) // 2
    computed = sum(flops.values()) - (masked if config.ops == "fused" or config.model.attention != "plain" else 0)
    return computed if config.mode == "forward" else 3 * computed


def refusal(
    config: WorkloadConfig,
    peak_bytes: float | None = None,
    seconds: float | None = None,
    device: str | None = None,
    shared_by: int | None = None,
) -> str | None:
    """Why a step of the case cannot have had this peak of memory or taken these seconds on the chip; None if it can.

    With loss scaling, which may skip every update, the optimizer's moments need not be there.
    """
    what, scaled = MODES[config.mode], config.precision == "fp16" and config.mode == "train_step"
    least = least_bytes(replace(config, mode="forward_backward") if scaled else config, shared_by)
    if peak_bytes is not None and peak_bytes < least:
        return (
            f"{what} holds at least {least / 1e9:.2f} GB by arithmetic, weights, optimizer state and what the backward "
            f"pass reads, but its peak was measured as {peak_bytes / 1e9:.2f} GB: the measurement misses memory."
        )
    rate = peak_flops(device, config.precision) if device else None
    if seconds is not None and rate is not None and least_flops(config) > rate * seconds:
        return (
            f"{what} in {1e3 * seconds:.3g} ms is {least_flops(config) / seconds / 1e12:,.0f} TFLOP/s, but the peak of "
            f"{device} is {rate / 1e12:,.0f}: the clock did not wait for the work."
        )
    return None


def refusal_of(config: WorkloadConfig, result: Any) -> str | None:
    """`refusal` of what a task of `lmcore.profiling.runner.run_cases` returned, as far as it measured steps."""
    if not isinstance(result, Mapping):
        return None
    peak = result.get("peak_memory_bytes", result.get("torch_peak_bytes"))
    walls = [sample["wall"] for sample in result.get("samples", ()) if not sample["warmup"]]
    return refusal(config, peak, statistics.median(walls) if walls else None, result.get("device"))
