"""Timing tables for readers: columns that say something, times with their spread, ways to end in words."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from lmcore.formatting import format_bytes, format_significant
from lmcore.profiling.timing import by_busy_time

MODES = {"forward": "forward", "forward_backward": "forward + backward", "train_step": "training step"}
"""What a case runs, for readers."""

MISSING = "–"

SETTINGS = ("context", "precision", "mode", "batch", "ops", "attention", "compiled")
"""Columns of `readable` that are left out where all of several cases have the same."""


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
    if row["outcome"] != "complete" or pd.isna(row["wall_median"]):
        return row["outcome"]
    return median_spread(row) + (f"; busy {median_spread(row, 'busy')}" if by_busy_time(row) else "")


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """A timing table as text, a row for each case, without empty columns and without settings that are all the same."""

    def known(value: Any, words: Callable[[Any], str]) -> str:
        return words(value) if pd.notna(value) else MISSING

    shown = pd.DataFrame(
        {
            "size": row["size"] if pd.notna(row["size"]) else f"{row['num_layers']} × {row['d_model']}",
            "context": f"{row['context_length']:,}",
            "precision": row["precision"],
            "mode": MODES[row["mode"]],
            "batch": f"{row['batch_size']:,}",
            "ops": row["ops"],
            "attention": row["attention"],
            "compiled": "yes" if row["compile"] else "no",
            "mean ± std (ms)": spread(row["wall_mean"], row["wall_std"]),
            "median (spread) (ms)": timed(row),
            "tokens/s": known(row["tokens_per_second"], "{:,.0f}".format),
            "MFU": known(row["mfu"], "{:.1%}".format),
            "peak memory": known(row["peak_memory_bytes"], format_bytes),
            "J/step": known(row.get("joules_per_step"), format_significant),
        }
        for row in table.to_dict("records")
    )
    same = [name for name in SETTINGS if len(shown) > 1 and shown[name].nunique() == 1]
    return shown.drop(columns=[*same, *(name for name in shown if (shown[name] == MISSING).all())])
