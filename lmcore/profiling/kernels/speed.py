"""Rows of `benchmarks/speed.py`: contestants at the same work, our fast path among them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

SETTINGS = ["size", "batch_size", "context_length", "vocab_size", "head_size", "mode", "causal"]
"""Settings that have a column of their own in `rows_table`."""

NUMBERS = ["median", "low", "high", "peak_bytes", "rate", "share"]

OUR_SLOWER = ("lmcore", "plain", "+")
"""How the names of our own slower variants begin; they are no peers."""


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
