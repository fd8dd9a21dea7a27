"""Tokens a second of the three ways to decode: the whole window again, with a KV cache, and by our kernels."""

from collections.abc import Mapping
from pathlib import Path
from timeit import default_timer
from typing import Any

import pandas as pd
import torch

from lmcore.accounting import num_parameters
from lmcore.config import GenerateConfig, from_dict
from lmcore.device import autocast, device_name, select_device, set_matmul_precision
from lmcore.generate import generate
from lmcore.model import TransformerLM
from lmcore.profiling.ceilings import Timer, copy_ceiling
from lmcore.profiling.kernels.measuring import activation_dtype
from lmcore.profiling.workload import WorkloadConfig

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"kv_cache": False},
    "cached": {"kv_cache": True},
    "fused": {"kv_cache": True, "ops": "fused"},
}
"""Settings of `lmcore.config.GenerateConfig` by way to decode."""

PROMPT = 16
"""Tokens of each prompt; the rest of the context is decoded."""


def measure_decoding(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times greedy decoding of a whole context by each way, from random weights: a task of `run_cells`.

    The batch is of `config.batch_size` prompts. The result holds `device`, `copy_bytes_per_second`, `new_tokens` of
    each prompt, and `rows`: `way`, `seconds` of each of `config.steps` repeats, and `same_tokens` as the first way.
    """
    device, _ = select_device(config.device)
    set_matmul_precision(device, config.precision)
    torch.manual_seed(config.seed)
    model = TransformerLM(config.model, device=device)
    prompts = torch.randint(config.model.vocab_size, (config.batch_size, PROMPT)).tolist()
    new_tokens, rows, first = config.model.context_length - PROMPT, [], None
    for way, settings in WAYS.items():
        chosen = GenerateConfig(max_new_tokens=new_tokens, temperature=0.0, **settings)
        seconds = []
        for repeat in range(config.steps + 1):
            began = default_timer()
            with autocast(device, config.precision):
                output = generate(model, prompts, chosen)
            if repeat:  # the first one warms up; the output is on the host, so the device is done
                seconds.append(default_timer() - began)
        first = output if first is None else first
        same = sum(
            a == b for ours, theirs in zip(output, first, strict=True) for a, b in zip(ours, theirs, strict=True)
        )
        rows.append({"way": way, "seconds": seconds, "same_tokens": same / (new_tokens * len(prompts))})
    copy = copy_ceiling(device, Timer(device))
    return {"device": device_name(device), "new_tokens": new_tokens, "copy_bytes_per_second": copy, "rows": rows}


def decoding_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each way and record of `measure_decoding`.

    `bound` is how many tokens a second reading all weights once for each of them, at the speed of a copy, would allow.
    """
    rows = []
    for record in records.values():
        config, result = from_dict(WorkloadConfig, record["config"]), record["result"] or {}
        weights = (num_parameters(config.model) - config.model.vocab_size * config.model.d_model) * (
            activation_dtype(config).itemsize
        )
        for row in result.get("rows", ()):
            median = pd.Series(row["seconds"]).median()
            tokens = config.batch_size * result["new_tokens"]
            rows.append(
                {
                    "cell": record["cell"],
                    "size": config.size,
                    "batch_size": config.batch_size,
                    "context_length": config.model.context_length,
                    "precision": config.precision,
                    "way": row["way"],
                    "seconds": median,
                    "tokens_per_second": tokens / median,
                    "same_tokens": row["same_tokens"],
                    "bound": config.batch_size * result["copy_bytes_per_second"] / weights,
                    "device": result["device"],
                }
            )
    return pd.DataFrame(rows)
