"""The table that the command prints: every row, its peers, and how far it is from its target."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lmcore.workbook.report.kernels.speed import fastest, judged, ours_of, peers_of, table_of


def lines(rows: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of text: each piece of work with its contestants, then a line for each target whose row was measured."""
    table = table_of(rows)
    for name, group in table.groupby("row", sort=False):
        ours, peer = fastest(ours_of(group)), fastest(peers_of(group))
        yield f"{group['work'].iloc[0]}  [{name}]"
        width = max(map(len, group["contestant"])) + 2
        yield from (f"    {row['contestant']:<{width}}{_figures(row, peer)}" for _, row in group.iterrows())
        if ours is not None and peer is not None:
            yield f"    {peer['median'] / ours['median']:.2f} times as fast as the best peer"
    for target in targets:
        result = judged(target, table[table["row"] == target["row"]])
        if (value := result["measured"]) is not None:
            verdict = "reached" if result["reached"] else "NOT reached"
            number = {"peak_bytes": f"{value / 2**30:.2f} GiB", "share": f"{value:.1%}"}.get(target["measure"])
            against = f"{value / target.get('at_most', target.get('at_least')):.2f} of the target"
            yield f"{target['row']:<32}{target['text']:<20}{number or f'{value:,.2f}'} ({verdict}, {against})"


def _figures(row: Mapping[str, Any], peer: Mapping[str, Any] | None) -> str:
    if row["outcome"] != "complete":
        return f"{row['outcome']}: {(row['reason'] or '')[:90]}"
    error, beaten = row["notes"].get("relative_error"), peer is not None and row["contestant"] != peer["contestant"]
    parts = [
        f"{row['median']:9.3f} {row['unit']} ({row['low']:.3f} to {row['high']:.3f}, {row['repeats']} repeats)",
        f"{row['rate']:,.0f} {row['rate_unit']}" if pd.notna(row["rate"]) else "",
        f"{row['share']:.1%} of {row['share_of']}" if pd.notna(row["share"]) else "",
        f"{row['peak_bytes'] / 2**30:.2f} GiB" if pd.notna(row["peak_bytes"]) else "",
        f"{row['median'] / peer['median']:.2f} × best peer's time" if beaten else "",
        f"error {error:.1e}" if error is not None else "",
    ]
    return ", ".join(filter(None, parts))
