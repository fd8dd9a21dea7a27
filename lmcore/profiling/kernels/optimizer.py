"""AdamW with gradient clipping over a whole model: bytes counted, time measured (tasks of notebook 07)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from lmcore.device import device_name
from lmcore.kernels.adamw import FusedAdamW
from lmcore.kernels.common.support import runs_triton
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW, gradient_clipping
from lmcore.profiling.kernels.bytes_moved import BytesMoved, moved_by
from lmcore.profiling.kernels.measuring import Absent, Contestant, begin, race
from lmcore.profiling.peak_rates import copy_rate
from lmcore.profiling.timing import BUDGET, Timer
from lmcore.profiling.workload import WorkloadConfig

MAX_NORM = 1.0

ONE_PASS = 4 + 16 + 12
"""Bytes for each parameter of an update in one pass, all in float32: the gradient for its norm; weight, gradient and
both moments in; weight and both moments out."""

ONE_PASS_MIXED = 2 + 14 + 14
"""The same with bfloat16 gradients, and with a bfloat16 copy of the weight written for the next forward pass."""

TORCH_FUSED = 4 + 8 + 28
"""Clipping of PyTorch's reads every gradient for the norm, then reads and writes it; the fused update is one pass."""

COUNTED = 1 << 20
"""Parameters of which operations are counted: so many that scalars do not show."""

Update = Callable[[], Any]


def plain(parameters: list[nn.Parameter], max_norm: float | None = None, **settings: Any) -> Update:
    """The update of `lmcore.optimizer`, operation by operation; with `max_norm` clipping goes before it."""
    step = AdamW(parameters, **settings).step
    return step if max_norm is None else lambda: (gradient_clipping(parameters, max_norm), step())


def torch_fused(parameters: list[nn.Parameter], max_norm: float | None = None, **settings: Any) -> Update:
    """PyTorch's fused update. Raises `Absent` on a device that it does not serve."""
    try:
        step = torch.optim.AdamW(parameters, fused=True, **settings).step
    except RuntimeError as error:
        raise Absent((str(error).splitlines() or ["no reason given"])[0]) from error
    return step if max_norm is None else lambda: (nn.utils.clip_grad_norm_(parameters, max_norm), step())


def ours(parameters: list[nn.Parameter], max_norm: float | None = None, **settings: Any) -> Update:
    """Our fused update."""
    return FusedAdamW(parameters, max_grad_norm=max_norm, **settings).step


def update_moved(update: Callable[..., Update] = plain, device: str = "meta") -> BytesMoved:
    """What one step with clipping moves for `COUNTED` parameters, operation by operation."""
    weight = nn.Parameter(torch.zeros(COUNTED, device=device))
    weight.grad = torch.zeros_like(weight)
    step = update([weight], MAX_NORM)
    step()  # the moments exist from the first step on
    return moved_by(step)


def measure_optimizer(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times clipping and update of all parameters of `config.model` in float32, in turns: a task of `run_cases`.

    The result holds `device`, `parameters`, `copy_bytes_per_second` of a large copy there, and `rows`: `contestant`,
    `seconds` (None with a `reason` where it does not run here) and `bytes_per_parameter` as counted.
    """
    device = begin(config)
    parameters = list(TransformerLM(config.model, device=device).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kernels = runs_triton(device)
    updates = {
        "plain, operation by operation": (plain, counted_each()),
        "torch.optim.AdamW(fused=True)": (torch_fused, TORCH_FUSED),
        "ours, in one pass" if kernels else "ours, as plain operations": (
            ours, ONE_PASS if kernels else counted_each(ours, "cpu")
        ),
    }  # fmt: skip

    def build(update: Callable[..., Update]) -> Contestant:
        return Contestant(update(parameters, MAX_NORM))

    results = race({name: partial(build, update) for name, (update, _) in updates.items()}, device, BUDGET[device.type])
    rows = []
    for name, result in results.items():
        seconds = median(result.seconds) if result.seconds else None
        row = {"contestant": name, "bytes_per_parameter": updates[name][1], "seconds": seconds}
        rows.append(row | {"outcome": "complete" if seconds else "absent", "reason": result.reason})
    return {
        "device": device_name(device),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "copy_bytes_per_second": copy_rate(device, Timer(device)),
        "rows": rows,
    }


def counted_each(*arguments: Any) -> float:
    """Bytes that `update_moved` counts for each parameter."""
    return round(update_moved(*arguments).total / COUNTED, 2)
