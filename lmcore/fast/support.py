"""Which models and precisions the explicit step covers."""

import torch

from lmcore.config import ModelConfig
from lmcore.fast.kernels.attention import MAX_HEAD_SIZE

WIDEST_ROW = 8192
"""Largest d_model of the norm's kernels, which hold whole rows."""

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def precision_of(dtype: torch.dtype) -> str:
    """What settings call computing in `dtype`; of others PyTorch's own name."""
    return PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))


def unsupported_reason(config: ModelConfig, precision: str, ranks: int = 0) -> str | None:
    """What of this model or precision the fused step does not cover, to end a sentence with; None if it covers it.

    `ranks` is the number of processes that divide the weights, if they do.
    """
    obstacles = {
        f"norm={config.norm}": config.norm != "pre",
        f"position={config.position}": config.position == "sinusoidal",
        "qk_norm": config.qk_norm,
        f"num_kv_heads={config.num_kv_heads}": config.kv_heads != config.num_heads,
        "parallel blocks": config.parallel,
        f"ffn={config.ffn}": config.ffn != "swiglu",
        f"heads of {config.d_k} features (at most {MAX_HEAD_SIZE})": config.d_k > MAX_HEAD_SIZE,
        f"d_model={config.d_model} (at most {WIDEST_ROW})": config.d_model > WIDEST_ROW,
        f"d_model={config.d_model} and d_ff={config.d_ff} divided by {ranks} ranks": ranks > 0
        and (config.d_model % ranks or config.d_ff % ranks),
        f"precision={precision}": precision not in ("bf16", "fp32", "tf32"),
    }
    found = [name for name, present in obstacles.items() if present]
    return ", ".join(found) or None
