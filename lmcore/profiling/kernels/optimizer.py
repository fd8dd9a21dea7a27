"""AdamW with gradient clipping over a whole model: bytes counted, time measured (tasks of notebook 07)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from lmcore.config import from_dict
from lmcore.device import device_name, select_device
from lmcore.kernels.adamw import FusedAdamW
from lmcore.kernels.common.support import runs_triton
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW, gradient_clipping
from lmcore.profiling.ceilings import Timer, copy_ceiling
from lmcore.profiling.kernels.traffic import Traffic, meta, traffic_of
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


def plain_update_traffic() -> Traffic:
    """What one step of the plain AdamW and clipping moves for `COUNTED` parameters, operation by operation."""
    weight = nn.Parameter(meta(COUNTED))
    optimizer = AdamW([weight])
    weight.grad = meta(COUNTED)
    optimizer.step()  # the moments exist from the first step on

    def run() -> None:
        gradient_clipping([weight], MAX_NORM)
        optimizer.step()

    return traffic_of(run)


def twin_traffic() -> Traffic:
    """The same of `FusedAdamW` where there is no Triton."""
    weight = nn.Parameter(torch.zeros(COUNTED))
    optimizer = FusedAdamW([weight], max_grad_norm=MAX_NORM)
    weight.grad = torch.zeros(COUNTED)
    optimizer.step()
    return traffic_of(optimizer.step)


def bytes_each(traffic: Traffic) -> float:
    """Bytes for each of the `COUNTED` parameters."""
    return round(traffic.total / COUNTED, 2)


def contestants(parameters: list[nn.Parameter]) -> dict[str, tuple[float, Callable[[], Callable[[], Any]]]]:
    """Bytes for each parameter, and what makes the step, of each way to clip and update."""

    def plain() -> Callable[[], Any]:
        optimizer = AdamW(parameters)
        return lambda: (gradient_clipping(parameters, MAX_NORM), optimizer.step())

    def of_torch() -> Callable[[], Any]:
        optimizer = torch.optim.AdamW(parameters, fused=True)
        return lambda: (nn.utils.clip_grad_norm_(parameters, MAX_NORM), optimizer.step())

    def fused() -> Callable[[], Any]:
        return FusedAdamW(parameters, max_grad_norm=MAX_NORM).step

    kernels = runs_triton(parameters[0].device)
    ours = ("ours, in one pass", ONE_PASS) if kernels else ("ours, as plain operations", bytes_each(twin_traffic()))
    return {
        "plain, operation by operation": (bytes_each(plain_update_traffic()), plain),
        "torch.optim.AdamW(fused=True)": (TORCH_FUSED, of_torch),
        ours[0]: (ours[1], fused),
    }


def measure_optimizer(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times clipping and update of all parameters of `config.model` in float32: a task of `run_cells`.

    The result holds `device`, `parameters`, `copy_bytes_per_second` of a large copy there, and `rows`: `contestant`,
    `seconds` (None with a `reason` where it does not run here) and `bytes_per_parameter` as counted.
    """
    device, _ = select_device(config.device)
    torch.manual_seed(config.seed)
    parameters = list(TransformerLM(config.model, device=device).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    timer, rows = Timer(device), []
    for name, (moved, make) in contestants(parameters).items():
        row: dict[str, Any] = {"contestant": name, "bytes_per_parameter": moved, "seconds": None, "reason": None}
        try:
            row["seconds"], _ = timer(make())
        except (RuntimeError, NotImplementedError) as error:  # PyTorch has a fused AdamW for some devices alone
            row["reason"] = (str(error).splitlines() or [type(error).__name__])[0]
        rows.append(row)
    return {
        "device": device_name(device),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "copy_bytes_per_second": copy_ceiling(device, timer),
        "rows": rows,
    }


def optimizer_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each contestant of each record of `measure_optimizer`; bytes per second by the bytes counted."""
    rows = []
    for record in records.values():
        config, result = from_dict(WorkloadConfig, record["config"]), record["result"] or {}
        for row in result.get("rows", ()):
            seconds, moved = row["seconds"], row["bytes_per_parameter"] * result["parameters"]
            rate = moved / seconds if seconds else None
            rows.append(
                {"cell": record["cell"], "size": config.size, "outcome": "complete" if seconds else "absent"}
                | row
                | {"parameters": result["parameters"], "bytes": moved, "bytes_per_second": rate}
                | {"copy_bytes_per_second": result["copy_bytes_per_second"], "device": result["device"]}
            )
    return pd.DataFrame(rows)
