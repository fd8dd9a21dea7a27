"""The table that the command prints: every row, its peers, and how far it is from its target."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lmcore.workbook.report.kernels.speed import fastest, judged, ours_of, peers_of, table_of


def lines(rows: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of text: each piece of work with its contestants, then the targets."""
    table = table_of(rows)
    for name, group in table.groupby("row", sort=False):
        ours, peer = fastest(ours_of(group)), fastest(peers_of(group))
        yield f"{group['work'].iloc[0]}  [{name}]"
        width = max(map(len, group["contestant"])) + 2
        yield from (f"    {row['contestant']:<{width}}{_figures(row, peer)}" for _, row in group.iterrows())
        if ours is not None and peer is not None:
            yield f"    {peer['median'] / ours['median']:.2f} times as fast as the best peer"
    yield from target_lines(table, targets)


def target_lines(table: pd.DataFrame, targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each target whose row was measured."""
    for target in targets:
        result = judged(target, table[table["row"] == target["row"]])
        if result["reached"] is None:
            continue
        verdict = "reached" if result["reached"] else "NOT reached"
        value, limit = result["measured"], target.get("at_most", target.get("at_least"))
        yield f"{target['row']:<32}{target['text']:<20}{_number(value, target['measure'])} ({verdict}, " + (
            f"{value / limit:.2f} of the target)"
        )


def _number(value: float, measure: str) -> str:
    if measure == "peak_bytes":
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.1%}" if measure == "share" else f"{value:,.2f}"


def _figures(row: Mapping[str, Any], peer: Mapping[str, Any] | None) -> str:
    if row["outcome"] != "complete":
        return f"{row['outcome']}: {(row['reason'] or '')[:90]}"
    parts = [f"{row['median']:9.3f} {row['unit']} ({row['low']:.3f} to {row['high']:.3f}, {row['repeats']} repeats)"]
    if pd.notna(row["rate"]):
        parts.append(f"{row['rate']:,.0f} {row['rate_unit']}")
    if pd.notna(row["share"]):
        parts.append(f"{row['share']:.1%} of {row['share_of']}")
    if pd.notna(row["peak_bytes"]):
        parts.append(f"{row['peak_bytes'] / 2**30:.2f} GiB")
    if peer is not None and row["contestant"] != peer["contestant"]:
        parts.append(f"{row['median'] / peer['median']:.2f} × best peer's time")
    if (error := row["notes"].get("relative_error")) is not None:
        parts.append(f"error {error:.1e}")
    return ", ".join(parts)
