"""Attention alone: its FLOPs and bytes, and eager, PyTorch's fused kernel and ours timed, with their memory."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.config import ModelConfig, from_dict
from lmcore.device import device_name, select_device, set_matmul_precision
from lmcore.functional import scaled_dot_product_attention
from lmcore.kernels.attention import flash_attention
from lmcore.kernels.sdpa import fused_causal_attention
from lmcore.model import causal_mask
from lmcore.profiling.kernels.measuring import DTYPES, measured, with_gradients
from lmcore.profiling.kernels.traffic import Traffic, meta, traffic_of
from lmcore.profiling.workload import WorkloadConfig, workload_config

BACKWARD = 2.5
"""FLOPs of the backward pass for each of the forward pass: five products of (T, T) by (T, K), where that has two."""


def attention_cells(
    size: str, contexts: Sequence[int], kinds: Sequence[str] = ("plain", "sdpa", "flash"), **changes: Any
) -> dict[str, WorkloadConfig]:
    """Every kind of attention at every context, in the heads of a named size: medium-4096-bf16-flash and so on."""
    return {
        f"{cell.size}-{context}-{cell.precision}-{kind}": cell
        for context, kind in itertools.product(contexts, kinds)
        for cell in [workload_config(size, context, attention=kind, passes="forward_backward", **changes)]
    }


def attention_of(kind: str, context_length: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of (..., T, K) queries, keys and values as `ModelConfig.attention` names it."""
    if kind == "plain":
        mask = causal_mask(context_length, context_length, device)
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, mask)
    return fused_causal_attention if kind == "sdpa" else flash_attention


def measure_attention(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Time and memory of one causal attention of the cell's shape: a task of `lmcore.profiling.runner.run_cases`.

    The result holds `device`, and for `forward` (inference) and `both` passes `seconds` and `extra_bytes`: the most
    memory beside queries, keys, values and the output's gradient; outputs and gradients are part of it.
    """
    device, _ = select_device(config.device)
    set_matmul_precision(device, config.precision)
    torch.manual_seed(config.seed)
    model, dtype = config.model, DTYPES[config.precision]
    shape = (config.batch_size, model.num_heads, model.context_length, model.d_k)
    attend = attention_of(model.attention, model.context_length, device)
    q, k, v, gradient = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return {
        "device": device_name(device),
        "forward": measured(lambda: with_gradients(attend, (q, k, v)), device),
        "both": measured(lambda: with_gradients(attend, leaves, gradient), device),
    }


def causal_flops(model: ModelConfig, batch_size: int) -> int:
    """FLOPs of one layer's two matmuls over the pairs that a causal mask leaves, which a kernel need not exceed."""
    pairs = model.context_length * (model.context_length + 1) // 2
    return 2 * 2 * batch_size * model.num_heads * pairs * model.d_k


def least_bytes(model: ModelConfig, batch_size: int, width: int) -> int:
    """Bytes that the forward pass of one layer must move: queries, keys and values in, outputs out, `width` each."""
    return 4 * batch_size * model.num_heads * model.context_length * model.d_k * width


def eager_traffic(model: ModelConfig, batch_size: int, dtype: torch.dtype, backward: bool = False) -> Traffic:
    """What the plain definition moves in one layer, counted operation by operation on tensors without memory."""
    shape = (batch_size, model.num_heads, model.context_length, model.d_k)
    q, k, v = (meta(*shape, dtype=dtype, grad=backward) for _ in range(3))
    mask = causal_mask(model.context_length, model.context_length, torch.device("meta"))

    def run() -> None:
        output = scaled_dot_product_attention(q, k, v, mask)
        if backward:
            output.backward(torch.empty_like(output))

    return traffic_of(run)


def attention_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each record of `measure_attention` and each of forward and both passes."""
    rows = []
    for record in records.values():
        config, result = from_dict(WorkloadConfig, record["config"]), record["result"] or {}
        model = config.model
        head = {name: getattr(model, name) for name in ("context_length", "num_heads", "d_k")}
        head |= {name: getattr(config, name) for name in ("batch_size", "precision")}
        for passes, factor in (("forward", 1.0), ("both", 1.0 + BACKWARD)):
            found = result.get(passes) or {"seconds": None, "extra_bytes": None}
            flops = factor * causal_flops(model, config.batch_size)
            row = {"cell": record["cell"], "attention": model.attention, "passes": passes} | head | found
            row |= {"outcome": record["outcome"], "reason": record["reason"], "flops": flops}
            row["flops_per_second"] = flops / found["seconds"] if found["seconds"] else None
            rows.append(row | {"device": result.get("device") or (record["environment"] or {}).get("device")})
    return pd.DataFrame(rows, columns=ATTENTION_COLUMNS if rows else None)


ATTENTION_COLUMNS = [
    "cell", "attention", "passes", "context_length", "batch_size", "num_heads", "d_k", "precision", "outcome",
    "reason", "seconds", "extra_bytes", "flops", "flops_per_second", "device",
]  # fmt: skip
