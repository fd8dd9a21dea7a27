"""The table that the command prints: every row, its peers, and how far it is from its target."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from .targets import best, is_peer, is_reached, measured, times_faster

Rows = Sequence[dict[str, Any]]


def lines(rows: Rows, targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of text: each cell's contestants, then the targets."""
    for _, group in groupby(rows, key=lambda row: row["row"]):
        found = list(group)
        peer = best([row for row in found if is_peer(row)])
        yield f"{found[0]['work']}  [{found[0]['row']}]"
        yield from (f"    {row['contestant']:<28}{_figures(row, peer)}" for row in found)
        if (ratio := times_faster(found)) is not None:
            yield f"    {ratio:.2f} times as fast as the best peer"
    yield from target_lines(rows, targets)


def target_lines(rows: Rows, targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each target whose row was measured."""
    for target in targets:
        value = measured(target, rows)
        if value is None:
            continue
        verdict = "reached" if is_reached(target, value) else "NOT reached"
        limit = target.get("at_most", target.get("at_least"))
        yield f"{target['row']:<32}{target['text']:<20}{_number(value, target['measure'])} ({verdict}, " + (
            f"{value / limit:.2f} of the target)"
        )


def _number(value: float, measure: str) -> str:
    if measure == "peak_bytes":
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.1%}" if measure == "share" else f"{value:,.2f}"


def _figures(row: dict[str, Any], peer: dict[str, Any] | None) -> str:
    if row["outcome"] != "complete":
        return f"{row['outcome']}: {(row['reason'] or '')[:90]}"
    parts = [f"{row['median']:9.3f} {row['unit']} ({row['low']:.3f} to {row['high']:.3f}, {row['repeats']} repeats)"]
    if row["rate"] is not None:
        parts.append(f"{row['rate']:,.0f} {row['rate_unit']}")
    if row["share"] is not None:
        parts.append(f"{row['share']:.1%} of {row['share_of']}")
    if row["peak_bytes"] is not None:
        parts.append(f"{row['peak_bytes'] / 2**30:.2f} GiB")
    if peer is not None and row is not peer:
        parts.append(f"{row['median'] / peer['median']:.2f} × best peer's time")
    if (error := row["notes"].get("relative_error")) is not None:
        parts.append(f"error {error:.1e}")
    return ", ".join(parts)
