"""What sets the pace of a step, the GPU or the host that launches its kernels, and how it grows with the context."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import format_percent, format_significant
from lmcore.workbook.report.benchmark.views import ALIKE, given, ops_of, size_label

FLAT = 0.5
"""Power of the FLOPs below which time, from one cell to the next larger one, is said not to grow with them."""

UNSTEADY = 0.03
"""Standard deviation over mean above which a GPU's steps are the host's: kernels that never wait scatter far less."""

SAME = ("size", "passes", "precision", "attention", "compile", "checkpoint_every")
"""What two cells have in common, beside their ops, of which one is but the larger."""


def launches_set_pace(row: Mapping[str, Any], table: pd.DataFrame) -> bool:
    """Whether a step of this row of a timing table takes as long as the host launches it.

    So it is where the steps scatter, or the time hardly grows to the next longer context or larger batch in `table`,
    the optimizer (which works on parameters alone) left out. False without a CUDA device: there is nothing to launch.
    """
    if row.get("outcome") != "complete" or not given(row.get("cuda_median")):
        return False
    if given(row.get("wall_std")) and row["wall_std"] > UNSTEADY * row["wall_mean"]:
        return True
    larger = [other for other in table.to_dict("records") if _is_larger(other, row)]
    if not larger:
        return False
    following = min(larger, key=lambda other: other["flops"])
    return math.log(_without_optimizer(following) / _without_optimizer(row)) < FLAT * math.log(
        following["flops"] / row["flops"]
    )


def _is_larger(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    alike = all(other[name] == row[name] or not (given(other[name]) or given(row[name])) for name in SAME)
    alike = alike and ops_of(other) == ops_of(row)
    return alike and other["outcome"] == "complete" and other["flops"] > row["flops"]


def _without_optimizer(row: Mapping[str, Any]) -> float:
    optimizer = row.get("optimizer_mean")
    return row["wall_mean"] - (optimizer if given(optimizer) else 0)


def context_growth(at: pd.DataFrame) -> pd.DataFrame:
    """A row for each size with several contexts: the first and the last, and how tokens, FLOPs and time grow."""
    rows = []
    for _, cells in at.groupby("size", sort=False, dropna=False):
        cells = cells.sort_values("context_length")
        first, last = cells.iloc[0], cells.iloc[-1]
        if last["context_length"] == first["context_length"]:
            continue
        row = {"size": size_label(first), "num_parameters": first["num_parameters"]}
        row |= {"first": first["context_length"], "last": last["context_length"], "cuda": given(first["cuda_median"])}
        row |= {"start": first["wall_median"], "end": last["wall_median"]}
        names = (("tokens", "context_length"), ("FLOPs", "flops"), ("time", "wall_median"))
        row |= {name: last[column] / first[column] for name, column in names}
        before, after = first["optimizer_median"], last["optimizer_median"]
        known = given(before) and given(after)
        row["without"] = (row["end"] - after) / (row["start"] - before) if known else None
        row["optimizer"], row["optimizer_growth"] = (before / row["start"], after / before) if known else (None, None)
        rows.append(row)
    return pd.DataFrame(rows)


def growth_sentences(rows: pd.DataFrame) -> str:
    """What in `context_growth` is more or less than the growth of the FLOPs, and why."""
    beside_flops = rows["time"] / rows["FLOPs"]
    largest = rows.loc[rows["num_parameters"].idxmax()]
    text = []
    if beside_flops.min() < 1 - ALIKE:
        left = rows["time"].where(rows["without"].isna(), rows["without"]).astype(float) / rows["FLOPs"]
        short, still = "Time that grows less than the FLOPs is", left.min() < 1 - ALIKE
        if given(largest["optimizer"]) and largest["optimizer_growth"] <= 1 + ALIKE:
            text.append(
                f"Part of the step does not grow: the optimizer, **{format_percent(largest['optimizer'], 2)}** of the "
                f"step of `{largest['size']}` at {largest['first']:,}. Without it the time grows "
                f"**{format_significant(largest['without'], 2)} ×**, and the FLOPs "
                f"{format_significant(largest['FLOPs'], 2)} ×."
            )
            short = "What still falls short of the FLOPs is"
        if still or len(text) == 0:
            waits = "launches that the GPU waits for" if largest["cuda"] else "the cost of each call, whatever its size"
            text.append(f"{short} {waits}, or products too small to fill the {'GPU' if largest['cuda'] else 'device'}.")
    if beside_flops.max() > 1 + ALIKE:
        text.append(
            "Time that grows more than the FLOPs is that of work which they do not count: the scores, whose number "
            "grows with the square of the context, are scaled, masked and normalized besides."
        )
    return " ".join(text) or "Time grows as the FLOPs do."
