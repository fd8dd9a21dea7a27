"""Timing tables for readers: columns that say something, times with their spread, ways to end in words."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.formatting import format_bytes, format_count, format_percent, format_significant
from lmcore.profiling.timing import by_busy_time

MODES = {"forward": "forward", "forward_backward": "forward + backward", "train_step": "training step"}
"""What a case runs, for readers."""

MISSING = "–"


def spread(mean: float | None, std: float | None) -> str:
    """`mean ± std` in milliseconds, to the digits that the spread leaves; the mean alone where there is no std."""
    if pd.isna(mean):
        return MISSING
    digits = 3 if mean < 1 else 4
    text = format_significant(1e3 * mean, digits)
    return f"{text} ± {format_significant(1e3 * std, 2)}" if pd.notna(std) else text


def median_spread(row: Mapping[str, Any], clock: str = "wall") -> str:
    """`median (spread)` in milliseconds of a row of a timing table; the median alone where there is one sample."""
    median, spread = row[f"{clock}_median"], row[f"{clock}_spread"]
    if pd.isna(median):
        return MISSING
    text = format_significant(1e3 * median)
    return f"{text} ({format_significant(1e3 * spread, 2)})" if pd.notna(spread) else text


def timed(row: Mapping[str, Any]) -> str:
    """`median_spread` of a row, that of its busy time after it where that is what counts; or how the case ended."""
    if not measured(row):
        return row["outcome"]
    return median_spread(row) + (f"; busy {median_spread(row, 'busy')}" if by_busy_time(row) else "")


def rate(value: float | None) -> str:
    """FLOP/s in units of 10^12, or of 10^9 below one of those."""
    if pd.isna(value):
        return MISSING
    unit, name = (1e12, "TFLOP/s") if value >= 1e12 else (1e9, "GFLOP/s")
    return f"{format_significant(value / unit)} {name}"


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """A timing table as text, a row for each case. Columns of settings that are the same everywhere are left out; plain
    operations are named beside fused ones only."""
    rows = [_row(row) for row in table.to_dict("records")]
    shown = pd.DataFrame(rows)
    constant = [name for name in SETTINGS if name in shown and shown[name].nunique() == 1 and len(shown) > 1]
    empty = [name for name in shown if (shown[name] == MISSING).all()]
    usual = ["ops"] if rows and all(row["ops"] == "plain" for row in rows) else []
    return shown.drop(columns=list({*constant, *empty, *usual} - {"size"}))


SETTINGS = ("context", "precision", "mode", "batch", "attention", "compiled", "warm-ups", "steps")


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "size": size_label(row),
        "context": f"{row['context_length']:,}",
        "precision": row["precision"],
        "mode": MODES[row["mode"]],
        "batch": f"{row['batch_size']:,}",
        "ops": row["ops"] if pd.notna(row.get("ops")) else "plain",  # tables from before there was a choice lack it
        "attention": row["attention"],
        "compiled": "yes" if row["compile"] else "no",
        "warm-ups": str(row["warmup_steps"]),
        "steps": str(row["steps"]),
        "wall clock (ms)": spread(row["wall_mean"], row["wall_std"]) if measured(row) else row["outcome"],
        "median (spread) (ms)": median_spread(row),
        "GPU busy (ms)": median_spread(row, "busy"),
        "tokens/s": format_count(row["tokens_per_second"]) if pd.notna(row["tokens_per_second"]) else MISSING,
        "achieved": rate(row["flops_per_second"]),
        "MFU": format_percent(row["mfu"]) if pd.notna(row["mfu"]) else MISSING,
        "peak memory": format_bytes(row["peak_memory_bytes"]) if pd.notna(row["peak_memory_bytes"]) else MISSING,
    }


def measured(row: Mapping[str, Any]) -> bool:
    """Whether a case was measured to its end."""
    return row["outcome"] == "complete" and pd.notna(row["wall_median"])


def size_label(row: Mapping[str, Any]) -> str:
    """The name of a model's size, or its numbers where it has none."""
    if pd.notna(row.get("size")):
        return row["size"]
    return f"{row['num_layers']} × {row['d_model']}" if "d_model" in row else MISSING


def failures(table: pd.DataFrame) -> str:
    """A sentence for the cases that could not be measured, with what was asked for; empty where there is none."""
    rows = [row for row in table.to_dict("records") if not measured(row)]
    short = [row for row in rows if row["outcome"] == "out of memory"]
    other = [row for row in rows if row["outcome"] != "out of memory"]
    named = (("Out of memory, and so without a time", short), ("Failed", other))
    return " ".join(f"{words}: {'; '.join(map(_listed, listed))}." for words, listed in named if listed)


def _listed(row: Mapping[str, Any]) -> str:
    """A case with the first two sentences of what PyTorch says: what was asked for, and what the device has."""
    reason = ". ".join(row["reason"].split(". ")[:2]).rstrip(".") if pd.notna(row["reason"]) else ""
    return f"`{row['case']}` ({reason})" if reason else f"`{row['case']}`"
