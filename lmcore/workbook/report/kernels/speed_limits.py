"""What a measured training step cannot do without, by counting: its matrix products and its passes over memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lmcore.accounting import forward_flops_by_component, num_parameters
from lmcore.config import ModelConfig, model_config
from lmcore.profiling.kernels.optimizer import ONE_PASS_MIXED
from lmcore.workbook.report.answers import format_percent, format_significant

FLOORS_INTRO = (
    "Floors are counted, not timed: a step's matrix products (of attention the causal half, with what its backward "
    "pass computes again) at the speed of a large product in the same run, and AdamW with clipping, "
    f"{ONE_PASS_MIXED} bytes for each parameter, at that of a large copy. Norms and SwiGLU's gate are counted at the "
    "copy's speed, too, and take less where activations stay in the cache. The rest is attention's exponentials, the "
    "softmax of the loss, RoPE, embeddings, products that do not fill the chip, and the time between kernels."
)


@dataclass(frozen=True)
class Floors:
    """Parts of a training step in milliseconds, counted and divided by measured ceilings."""

    products: float
    optimizer: float
    elementwise: float
    """Norms with their residual sums, and SwiGLU's gate, if all goes through memory."""

    @property
    def total(self) -> float:
        """All of them, one after the other."""
        return self.products + self.optimizer + self.elementwise


def step_floors(settings: Mapping[str, Any], ceilings: Mapping[str, float]) -> Floors | None:
    """The floors of a step row's `settings` (size, batch_size, context_length, vocab_size); None without them."""
    copy, peak = ceilings.get("copy_bytes_per_second"), ceilings.get("bf16_flops_per_second")
    if not {"size", "batch_size", "context_length", "vocab_size"} <= settings.keys() or not copy or not peak:
        return None
    model = model_config(settings["size"], context_length=settings["context_length"], vocab_size=settings["vocab_size"])
    return Floors(
        products=1e3 * product_flops(model, settings["batch_size"]) / peak,
        optimizer=1e3 * ONE_PASS_MIXED * num_parameters(model) / copy,
        elementwise=1e3 * elementwise_bytes(model, settings["batch_size"]) / copy,
    )


def product_flops(model: ModelConfig, batch_size: int) -> float:
    """FLOPs of a step's matrix products: three times those with weights, 3.5 times the causal half of attention's.

    FlashAttention's backward pass has five products where the forward pass has two (Dao 2023, section 3.1).
    """
    flops = forward_flops_by_component(model, batch_size)
    attention = flops["scores"] + flops["weighted_sum"]
    return 3 * (sum(flops.values()) - attention) + 3.5 * attention / 2


def elementwise_bytes(model: ModelConfig, batch_size: int) -> int:
    """Bytes of norms and gates in bfloat16, both passes, as `lmcore.profiling.kernels.cases` counts them."""
    rows, norms = batch_size * model.context_length, 2 * model.num_layers + 1
    norm = (7 * norms - 2) * rows * model.d_model  # the first has no residual sum to read and to write
    gate = 8 * model.num_layers * rows * model.d_ff
    return 2 * (norm + gate)


def floor_words(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> str:
    """Of what our median time consists, as far as it can be counted, and what the target leaves for the rest."""
    ours = row["ours"]
    floors = step_floors(row["settings"] or {}, ceilings) if row["group"] == "step" else None
    if floors is None:
        return ""
    median, rest = ours["median"], ours["median"] - floors.total
    told = pd.isna(ours["share"]) or any(target["measure"] == "share" for target in row["targets"])
    mfu = "" if told else f"MFU {format_percent(ours['share'], 2)}; "
    text = (
        f"{mfu}products at least {_ms(floors.products)}, {format_percent(floors.products / median, 2)} of the step, "
        f"AdamW {_ms(floors.optimizer)}, norms and gate {_ms(floors.elementwise)}, the rest {_ms(rest)}"
    )
    for target in row["targets"]:
        if target["measure"] == "median" and target["reached"] is False:
            left = target["at_most"] - floors.total
            nothing = f"nothing: products, AdamW, norms and gate alone take {_ms(floors.total)}"
            text += f", for which the target leaves {_ms(left) if left > 0 else nothing}"
    return text


def _ms(value: float) -> str:
    return f"{format_significant(value, 2 if abs(value) < 1 else 3)} ms".replace("-", "−")
