"""The speed measurements of a machine (results/<machine>/speed.json): ours, the best peer and the target of each row.

`benchmarks/speed.py` writes the file: rows of contestants, the targets, the machine's ceilings and its provenance.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.errors import require
from lmcore.files import read_json
from lmcore.workbook.report.answers import format_count, format_percent, format_significant

NAME = "speed.json"

MEASURED_FIELDS = ["median", "low", "high", "peak_bytes", "rate", "share"]

COLUMNS = [
    "row", "group", "work", "settings", "contestant", "ours", "unit", *MEASURED_FIELDS, "repeats", "rate_unit",
    "share_of", "outcome", "reason", "notes", "run",
]  # fmt: skip

OUR_WAYS = ("lmcore", "plain", "+")
"""How the names of our own contestants begin, the slower ones too."""

COMPARED_GROUPS = ("step", "attention", "optimizer", "loss", "decode", "elementwise")
"""Groups of rows in which ours stands beside peers; the others are for figures."""


@dataclass(frozen=True)
class Speed:
    """What a speed file holds; a row for each contestant of each piece of work."""

    rows: pd.DataFrame
    targets: list[dict[str, Any]]
    provenance: dict[str, Any]
    ceilings: dict[str, float]
    """Of the last run that has rows here, as `provenance` is."""
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> str:
        """The chip that was measured."""
        return str(self.provenance.get("device", "an unknown device"))

    def of(self, group: str) -> pd.DataFrame:
        """The rows of a group."""
        return self.rows[self.rows["group"] == group]

    def ceilings_of(self, row: Mapping[str, Any]) -> dict[str, float]:
        """What the machine could do at best in the run that measured the row."""
        return _of_run(self.runs, row["run"], "ceilings", self.ceilings)


def _of_run(runs: Sequence[Mapping[str, Any]], number: int, key: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    return runs[number].get(key, otherwise) if number < len(runs) else otherwise


def read_speed(results: str | os.PathLike) -> Speed | None:
    """The speed measurements in a folder of results; None if there are none. Raises `UserError` on a damaged file."""
    path = Path(results) / NAME
    if not path.exists():
        return None
    content = read_json(path)
    keys = {"provenance", "ceilings", "rows", "targets"}
    whole = isinstance(content, dict) and keys <= content.keys() and all(map(is_row, content["rows"]))
    require(whole, f"{path} holds no speed measurements; make it with benchmarks/speed.py.")
    rows, runs = table_of(content["rows"]), content.get("runs", [])
    last = int(rows["run"].max()) if len(rows) else 0
    provenance = _of_run(runs, last, "environment", content["provenance"])
    return Speed(rows, content["targets"], provenance, _of_run(runs, last, "ceilings", content["ceilings"]), runs)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of a speed file as a table; what they do not say is NaN or None, and their run is the first."""
    table = pd.DataFrame(rows).reindex(columns=COLUMNS)
    for name in MEASURED_FIELDS:
        table[name] = table[name].astype(float)
    table["run"] = table["run"].astype(float).fillna(0).astype(int)
    return table


def is_row(row: Any) -> bool:
    """Whether this is a row of a speed file."""
    return isinstance(row, dict) and {"row", "group", "work", "contestant", "ours", "outcome", "median"} <= row.keys()


def fastest(rows: pd.DataFrame) -> pd.Series | None:
    """The row with the smallest median of those that were measured."""
    done = rows[(rows["outcome"] == "complete") & rows["median"].notna()]
    return done.loc[done["median"].idxmin()] if len(done) else None


def ours_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Our rows: the fast path."""
    return rows[rows["ours"].astype(bool)]


def peers_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of other software; our own slower ways are no peers."""
    return rows[~rows["ours"].astype(bool) & ~rows["contestant"].str.startswith(OUR_WAYS)]


def comparison(speed: Speed) -> pd.DataFrame:
    """One row for each piece of work with ours, the best peer and how many times as fast ours is, with its targets.

    Columns: row, group, work, settings; ours and peer, rows as dictionaries or None where nothing was measured; ended,
    how ours did in that case; faster; targets, each with what was `measured` and whether it is `reached`.
    """
    found = []
    shown = speed.rows[speed.rows["group"].isin(COMPARED_GROUPS)]
    for name, rows in shown.groupby("row", sort=False):
        ours, peer = fastest(ours_of(rows)), fastest(peers_of(rows))
        head = rows.iloc[0]
        found.append(
            {
                **{key: head[key] for key in ("row", "group", "work", "settings")},
                "ours": None if ours is None else ours.to_dict(),
                "ended": None if ours is not None else outcome_words(ours_of(rows)),
                "peer": None if peer is None else peer.to_dict(),
                "faster": None if ours is None or peer is None else peer["median"] / ours["median"],
                "targets": [judged(target, rows) for target in speed.targets if target["row"] == name],
            }
        )
    return pd.DataFrame(found)


def outcome_words(rows: pd.DataFrame) -> str:
    """How contestants without a time have ended: "out of memory"."""
    return ", ".join(dict.fromkeys(rows["outcome"])) or "absent"


def judged(target: dict[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    """The target with what was `measured`, and whether it is `reached`; both None where it was not measured.

    `measure` is a field of our row, or "rate over NAME": our rate divided by that contestant's in the same rows.
    """
    ours, (field, _, other) = fastest(ours_of(rows)), target["measure"].partition(" over ")
    value = None if ours is None or pd.isna(ours[field]) else float(ours[field])
    if value is not None and other:
        theirs = rows.loc[(rows["contestant"] == other) & (rows["outcome"] == "complete"), field].dropna()
        value = value / float(theirs.iloc[0]) if len(theirs) else None
    if value is None:
        return target | {"measured": None, "reached": None}
    reached = value <= target["at_most"] if "at_most" in target else value >= target["at_least"]
    return target | {"measured": value, "reached": bool(reached)}


def measure_words(target: dict[str, Any]) -> str:
    """What was measured for a target, with its unit: "2.31 ms", "48.2%", "1.05 times cuDNN"."""
    value, measure = target["measured"], target["measure"]
    if value is None:
        return "not measured"
    if measure == "share":
        return format_percent(value)
    if measure == "peak_bytes":
        return f"{format_significant(value / 2**30)} GiB"
    if " over " in measure:
        return f"{format_significant(value)} times {measure.partition(' over ')[2]}"
    return f"{format_significant(value)} ms" if measure == "median" else f"{three_digits(value)} tok/s"


def three_digits(value: float) -> str:
    """A rate to three digits, whole numbers too: 23,200."""
    return format_count(float(f"{value:.3g}"))


def milliseconds(row: dict[str, Any] | None) -> str:
    """The median of a row with its unit."""
    return "–" if row is None else f"{format_significant(row['median'])} {row['unit']}"


def rate_words(row: dict[str, Any] | None) -> str:
    """The rate of a row with its unit, if it has one."""
    if row is None or pd.isna(row["rate"]):
        return ""
    return f"{three_digits(row['rate'])} {row['rate_unit']}"
