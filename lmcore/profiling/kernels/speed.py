"""The record of `benchmarks/speed.py`: rows of contestants, our fast path among them, and its targets."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lmcore.errors import require
from lmcore.files import read_json

SETTINGS = ["size", "batch_size", "context_length", "vocab_size", "head_size", "mode", "causal"]
"""Settings that have a column of their own in `rows_table`."""

NUMBERS = ["median", "low", "high", "peak_bytes", "rate", "share"]

OUR_SLOWER = ("lmcore", "plain", "+")
"""How the names of our own slower variants begin; they are no peers."""


@dataclass(frozen=True)
class Speed:
    """What a file of measurements holds: a row for each contestant of each benchmark case."""

    rows: pd.DataFrame
    targets: list[dict[str, Any]]
    provenance: dict[str, Any]
    peak_rates: dict[str, float]
    """`bf16_flops_per_second` of a large matmul, `copy_bytes_per_second` of a large copy."""


def read_speed(path: str | os.PathLike) -> Speed:
    """The measurements in results/<machine>/speed.json. Raises `UserError` if there are none."""
    require(os.path.exists(path), f"There is no {path}; `python benchmarks/speed.py` measures it on a GPU.")
    content = read_json(path)
    whole = isinstance(content, dict) and {"provenance", "peak_rates", "rows", "targets"} <= content.keys()
    require(whole, f"{path} holds no speed measurements; make it with benchmarks/speed.py.")
    return Speed(rows_table(content["rows"]), *(content[key] for key in ("targets", "provenance", "peak_rates")))


def rows_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of the file as a table, with `SETTINGS` as columns, and `peer`: whether it is other software."""
    table = pd.DataFrame(rows)
    table[NUMBERS] = table[NUMBERS].astype(float)
    table["peer"] = [not row["ours"] and not row["contestant"].startswith(OUR_SLOWER) for row in rows]
    return table.join(pd.DataFrame([row["settings"] for row in rows]).reindex(columns=SETTINGS))


def fastest(rows: pd.DataFrame) -> pd.Series | None:
    """The row with the smallest median of those that were measured."""
    done = rows[(rows["outcome"] == "complete") & rows["median"].notna()]
    return done.loc[done["median"].idxmin()] if len(done) else None


def judged(target: Mapping[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    """The target with what was `measured`, and whether it is `reached`; both None where it was not measured.

    `measure` is a column of our row, or "rate over NAME": our rate divided by that contestant's in the same case.
    """
    rows = rows[rows["row"] == target["row"]]
    ours, (column, _, other) = fastest(rows[rows["ours"]]), target["measure"].partition(" over ")
    value = float("nan") if ours is None else ours[column]
    if other:
        value /= rows.loc[rows["contestant"] == other, column].astype(float).max()
    if pd.isna(value):
        return {**target, "measured": None, "reached": None}
    reached = value <= target["at_most"] if "at_most" in target else value >= target["at_least"]
    return {**target, "measured": float(value), "reached": bool(reached)}
