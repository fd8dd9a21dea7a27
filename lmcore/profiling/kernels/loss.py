"""The LM head and its loss alone, with logits in memory and without (tasks and cells of notebook 07)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.config import from_dict
from lmcore.device import device_name, select_device, set_matmul_precision
from lmcore.functional import cross_entropy
from lmcore.kernels.cross_entropy import CHUNK_BYTES, linear_cross_entropy_gradients
from lmcore.profiling.kernels.measuring import DTYPES, measured, with_gradients
from lmcore.profiling.workload import WorkloadConfig, workload_config

CHUNKS = 8
"""Chunks of sizes that the library would take in one, so that small ones show what large ones gain."""


def variant_cells(size: str, context_length: int, compiled: bool, **changes: Any) -> dict[str, WorkloadConfig]:
    """One cell with plain operations, one with fused ones, and with `compiled` one that torch.compile has made."""
    wanted = {"plain": {}, **({"compiled": {"compile": True}} if compiled else {}), "fused": {"ops": "fused"}}
    return {
        f"{size}-{context_length}-{name}": workload_config(size, context_length, **changes, **switches)
        for name, switches in wanted.items()
    }


def variant_of(config: WorkloadConfig) -> str:
    """What `variant_cells` calls this one."""
    return "fused" if config.ops == "fused" else "compiled" if config.compile else "plain"


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits x W^T, (N, V), which are materialized."""
    return cross_entropy(x @ weight.T, targets)


def loss_inputs(
    rows: int, d_model: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random activations (N, D), LM head (V, D) and targets (N); the first two require gradients."""
    x = torch.randn(rows, d_model, device=device).to(dtype)
    weight = (torch.randn(vocab_size, d_model, device=device) / d_model**0.5).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(vocab_size, (rows,), device=device)


def loss_and_gradients(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The loss and the gradients of activations and head."""
    return with_gradients(lambda x, weight: loss(x, weight, targets), (x, weight))


def measure_loss(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Time and memory of head and loss of the cell's size with both gradients: a task of `run_cases`.

    The result holds `device`, `seconds` and `extra_bytes`, of which the gradients of activations and head are a part;
    and `chunk_rows`, None where the library's own chunks were taken.
    """
    device, _ = select_device(config.device)
    set_matmul_precision(device, config.precision)
    torch.manual_seed(config.seed)
    dtype, rows, vocab_size = DTYPES[config.precision], config.tokens_per_step, config.model.vocab_size
    x, weight, targets = loss_inputs(rows, config.model.d_model, vocab_size, dtype, device)
    loss = torch.compile(plain_loss, dynamic=False) if config.compile else plain_loss
    chunk = max(1, rows // CHUNKS) if rows * vocab_size * dtype.itemsize <= CHUNK_BYTES else None

    def both() -> tuple[Tensor, ...]:
        if config.ops == "fused":
            return linear_cross_entropy_gradients(x.detach(), weight.detach(), targets, chunk_rows=chunk)
        return loss_and_gradients(loss, x, weight, targets)

    return {"device": device_name(device), "chunk_rows": chunk} | measured(both, device)


def loss_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each record of `measure_loss`; `logits_bytes` is the size of the (N, V) logits in that precision."""
    rows = []
    for record in records.values():
        config, result = from_dict(WorkloadConfig, record["config"]), record["result"] or {}
        width, positions, model = DTYPES[config.precision].itemsize, config.tokens_per_step, config.model
        rows.append(
            {
                "cell": record["cell"],
                "variant": variant_of(config),
                "rows": positions,
                "d_model": model.d_model,
                "vocab_size": model.vocab_size,
                "precision": config.precision,
                "outcome": record["outcome"],
                "reason": record["reason"],
                **{name: result.get(name) for name in ("seconds", "chunk_rows", "extra_bytes")},
                "logits_bytes": positions * model.vocab_size * width,
                "gradient_bytes": (positions + model.vocab_size) * model.d_model * width,
                "device": result.get("device") or (record["environment"] or {}).get("device"),
            }
        )
    return pd.DataFrame(rows)
