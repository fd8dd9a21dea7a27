"""Tokens a second of the three ways to decode: the whole window again, with a KV cache, and by our kernels."""

from pathlib import Path
from timeit import default_timer
from typing import Any

import torch

from lmcore.config import GenerateConfig
from lmcore.device import autocast, device_name
from lmcore.generate import generate
from lmcore.model import TransformerLM
from lmcore.profiling.kernels.measuring import begin
from lmcore.profiling.peak_rates import copy_rate
from lmcore.profiling.timing import Timer
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
    """Times greedy decoding of a whole context by each way, from random weights: a task of `run_cases`.

    The ways take turns on `config.batch_size` prompts. The result holds `device`, `copy_bytes_per_second`, `new_tokens`
    of each prompt, and `rows`: `way`, `seconds` of each of `config.steps` repeats, `same_tokens` as the first way.
    """
    device = begin(config)
    model = TransformerLM(config.model, device=device)
    prompts = torch.randint(config.model.vocab_size, (config.batch_size, PROMPT)).tolist()
    new_tokens = config.model.context_length - PROMPT
    outputs: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(config.steps + 1):  # the first one warms up
        for way in list(WAYS)[:: -1 if repeat % 2 else 1]:
            chosen = GenerateConfig(max_new_tokens=new_tokens, temperature=0.0, **WAYS[way])
            began = default_timer()
            with autocast(device, config.precision):
                outputs[way] = generate(model, prompts, chosen)
            if repeat:  # the output is on the host, so the device is done
                seconds[way].append(default_timer() - began)
    first = torch.tensor(outputs["plain"])
    same = {way: (torch.tensor(output) == first).double().mean().item() for way, output in outputs.items()}
    return {
        "device": device_name(device),
        "new_tokens": new_tokens,
        "copy_bytes_per_second": copy_rate(device, Timer(device)),
        "rows": [{"way": way, "seconds": seconds[way], "same_tokens": same[way]} for way in WAYS],
    }
