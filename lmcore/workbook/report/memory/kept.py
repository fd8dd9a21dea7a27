"""What one block keeps for the backward pass: measured and predicted, as a table and in words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.profiling.memory.saved import saved_by_operation
from lmcore.profiling.workload import WorkloadConfig
from lmcore.workbook.report.answers import format_bytes, format_percent, join_words
from lmcore.workbook.report.memory.tables import Records, config_of, exact_bytes

KEPT_COLUMNS = ["variant", "operation", "bytes", "weight_copy_bytes", "predicted_bytes", "tensors", "source"]


BYTES = ["bytes", "weight_copy_bytes", "predicted_bytes"]

WEIGHT_COPY = "weight copy"
"""Kind of a storage that is a parameter in half precision."""


def kept_by_block(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`lmcore.profiling.memory.saved.saved_by_operation` as a task for `lmcore.profiling.runner.run_cases`."""
    return {"saved": saved_by_operation(config)}


def variant_of(config: WorkloadConfig) -> str:
    """How a cell differs from the others: "bf16, fused attention"."""
    return config.precision + (", fused attention" if config.model.attention != "plain" else "")


def kept_table(records: Records) -> pd.DataFrame:
    """A row for each operation of each variant: bytes that one block keeps, measured and predicted, and which tensors.

    A variant that did not fit into the memory has its predictions alone, which are made on tensors without memory.
    """
    parts = []
    for record in records.values():
        config = config_of(record)
        predicted = named_operations(saved_by_operation(config, abstract=True))
        rows = (record.get("result") or {}).get("saved", [])
        measured = named_operations(rows)
        names = list(dict.fromkeys([*predicted["operation"], *measured["operation"]]))
        for name in names:
            ours, theirs = measured[measured["operation"] == name], predicted[predicted["operation"] == name]
            found = {
                "variant": variant_of(config),
                "operation": name,
                "bytes": int(ours["bytes"].sum()) if rows else None,
                "weight_copy_bytes": int(ours.loc[ours["kind"] == WEIGHT_COPY, "bytes"].sum()) if rows else None,
                "predicted_bytes": int(theirs["bytes"].sum()),
                "tensors": "; ".join(shapes_in_words(theirs)) or None,
                "source": "; ".join(dict.fromkeys(ours["source"])) or None,
            }
            parts.append(found)
    return exact_bytes(pd.DataFrame(parts, columns=KEPT_COLUMNS))


def named_operations(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Storages that a block saves, with the operations named as in the handouts."""
    return pd.DataFrame(
        [row | {"operation": name} for row, name in zip(rows, operation_names(rows), strict=True)],
        columns=["operation", "bytes", "source", "kind", "shape", "dtype"],
    )


def shapes_in_words(rows: pd.DataFrame) -> list[str]:
    """Shapes and types of storages, the same ones together: "2 of 4 × 128 × 5,120 float32"."""
    shapes = [" × ".join(f"{n:,}" for n in shape) for shape in rows["shape"]]
    counts = Counter(f"{shape} {dtype}" for shape, dtype in zip(shapes, rows["dtype"], strict=True))
    return [f"{count} of {text}" if count > 1 else text for text, count in counts.items()]


def operation_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each storage that a pre-norm block saves, in order."""
    names: list[str] = []
    for row in rows:
        function = row["source"].rpartition(" ")[2]
        attended = any(name in ("weighted sum", "fused attention") for name in names)
        if function == "Linear.forward":
            name = "q, k, v projections" if not attended else "output projection"
            if "norm 2" in names:
                name = "w2" if "gate" in names else "w1, w3"
        elif function == "scaled_dot_product_attention":
            name = "mask" if "MaskedFill" in row["operation"] else "weighted sum" if "softmax" in names else "scores"
        else:
            name = {
                "RMSNorm.forward": "norm 2" if attended else "norm 1",
                "RotaryPositionalEmbedding.forward": "rope",
                "fused_causal_attention": "fused attention",
                "flash_attention": "fused attention",
                "SwiGLU.forward": "gate",
            }.get(function, function)
        names.append(name)
    return names


def kept_answer(kept: pd.DataFrame, num_layers: int) -> str:
    """Which operations keep most, how the variants differ, and how well it was predicted."""
    measured = kept.dropna(subset="bytes").astype(dict.fromkeys(BYTES, float))
    if not len(measured):
        return "No block was measured, so there is nothing to compare."
    totals = measured.groupby("variant", sort=False)[BYTES].sum()
    first = totals.index[0]
    rows = measured[measured["variant"] == first].sort_values("bytes", ascending=False).head(3)
    named = [f"{row['operation']} ({format_bytes(row['bytes'])}: {row['tensors']})" for row in rows.to_dict("records")]
    share = rows["bytes"].sum() / totals.loc[first, "bytes"]
    text = (
        f"In {first}, one block keeps **{format_bytes(totals.loc[first, 'bytes'])}**, all {num_layers} of them "
        f"{format_bytes(num_layers * totals.loc[first, 'bytes'])}. The most is kept by {join_words(named)}: together "
        f"{format_percent(share, 2)}."
    )
    others = [
        f"{format_bytes(row['bytes'])} in {name} ({_change(row['bytes'] / totals.loc[first, 'bytes'] - 1)})"
        for name, row in totals.iloc[1:].iterrows()
    ]
    text += f" It is {join_words(others)}." if others else ""
    copies = [
        f"{format_bytes(row['weight_copy_bytes'])} in {name} are copies of weights"
        for name, row in totals.iterrows()
        if row["weight_copy_bytes"]
    ]
    if copies:
        text += f" Of that, {join_words(copies)}, which autocast makes for the products and autograd keeps."
    return f"{text} {_error_sentence(totals)}"


def _change(difference: float) -> str:
    if abs(difference) < 0.005:
        return "as much"
    return f"{format_percent(abs(difference), 2)} {'more' if difference > 0 else 'less'}"


def _error_sentence(totals: pd.DataFrame) -> str:
    errors = (totals["predicted_bytes"] / totals["bytes"] - 1).abs()
    if errors.max() == 0:
        return "The predictions are exact, to the byte."
    return f"The prediction is off by at most {format_percent(errors.max(), 2)} (in {errors.idxmax()})."
