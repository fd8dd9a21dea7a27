"""The speed measurements of a machine (results/<machine>/speed.json): ours, the best peer and the target of each row.

`benchmarks/speed.py` writes the file: rows of contestants, the targets, the machine's peak rates and its provenance.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.errors import require
from lmcore.files import read_json
from lmcore.workbook.report.answers import format_count, format_percent, format_significant, join_words

NAME = "speed.json"

MEASURED_FIELDS = ["median", "low", "high", "peak_bytes", "rate", "share"]

COLUMNS = [
    "row", "group", "work", "settings", "contestant", "ours", "unit", *MEASURED_FIELDS, "repeats", "rate_unit",
    "share_of", "outcome", "reason", "notes", "run",
]  # fmt: skip

SETTINGS = ["size", "batch_size", "context_length", "vocab_size", "head_size", "mode", "causal"]
"""Settings that have a column of their own in `Speed.rows`."""

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
    peak_rates: dict[str, float]
    """`bf16_flops_per_second` of a large matrix product, `copy_bytes_per_second` of a large copy."""


def read_speed(results: str | os.PathLike) -> Speed:
    """The speed measurements in a folder of results. Raises `UserError` if there are none."""
    path = Path(results) / NAME
    require(path.exists(), f"There is no {path}; `python benchmarks/speed.py` measures it on a GPU.")
    content = read_json(path)
    keys = {"provenance", "peak_rates", "rows", "targets"}
    whole = isinstance(content, dict) and keys <= content.keys() and all(map(is_row, content["rows"]))
    require(whole, f"{path} holds no speed measurements; make it with benchmarks/speed.py.")
    rows, runs = table_of(content["rows"]), content.get("runs", [])
    settings = pd.DataFrame([each or {} for each in rows["settings"]]).reindex(columns=SETTINGS)
    last = int(rows["run"].max()) if len(rows) else 0
    run = runs[last] if last < len(runs) else {}  # peak rates and provenance are those of the last run that has rows
    return Speed(
        rows.drop(columns=["settings", "notes"]).join(settings),
        content["targets"],
        run.get("environment", content["provenance"]),
        run.get("peak_rates", content["peak_rates"]),
    )


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


def comparison(rows: pd.DataFrame, targets: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row for each piece of work with ours, the best peer and how many times as fast ours is, with its targets.

    Columns: row, group, work; `lmcore` and `best peer` as text; faster, NaN without a peer; judged, the targets with
    what was `measured` and whether it is `reached`.
    """
    found = []
    for name, part in rows[rows["group"].isin(COMPARED_GROUPS)].groupby("row", sort=False):
        ours, peer, head = fastest(ours_of(part)), fastest(peers_of(part)), part.iloc[0]
        if ours_of(part).empty:  # another way of a peer, without ours beside it
            continue
        found.append(
            {
                **{key: head[key] for key in ("row", "group", "work")},
                "lmcore": ", ".join(dict.fromkeys(ours_of(part)["outcome"])) if ours is None else _figures(ours),
                "best peer": "–" if peer is None else f"{_figures(peer)} ({peer['contestant']})",
                "faster": float("nan") if ours is None or peer is None else peer["median"] / ours["median"],
                "judged": [judged(target, part) for target in targets if target["row"] == name],
            }
        )
    return pd.DataFrame(found)


def _figures(row: pd.Series) -> str:
    rate = "" if pd.isna(row["rate"]) else f"{_three_digits(row['rate'])} {row['rate_unit']}"
    if row["group"] == "decode" and rate:
        return rate
    return ", ".join(filter(None, [f"{format_significant(row['median'])} {row['unit']}", rate]))


def _three_digits(rate: float) -> str:
    return format_count(float(f"{rate:.3g}"))


def speed_table(compared: pd.DataFrame) -> str:
    """Rows of a `comparison` as a Markdown table: ours, the best peer, the ratio, and the targets."""
    rows = [
        {
            "work": row["work"],
            "lmcore": row["lmcore"],
            "best peer": row["best peer"],
            "times as fast": "–" if pd.isna(row["faster"]) else f"{row['faster']:.2f}",
            "target": "; ".join(map(target_words, row["judged"])) or "–",
        }
        for row in compared.to_dict("records")
    ]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def target_words(target: Mapping[str, Any]) -> str:
    """A target and whether it is reached: "≤ 2.4 ms: yes", or what came out instead: "≥ 50 % MFU: **no**, 43.0%"."""
    value, measure = target["measured"], target["measure"]
    if target["reached"] is None:
        return f"{target['text']}: not measured"
    if target["reached"]:
        return f"{target['text']}: yes"
    if measure == "share":
        found = format_percent(value)
    elif measure == "peak_bytes":
        found = f"{format_significant(value / 2**30)} GiB"
    elif " over " in measure:
        found = f"{format_significant(value)} times {measure.partition(' over ')[2]}"
    else:
        found = f"{format_significant(value)} ms" if measure == "median" else f"{_three_digits(value)} tok/s"
    return f"{target['text']}: **no**, {found}"


def speed_block(results: str | os.PathLike) -> str:
    """What the README says of the fast path: the rows with targets, as section 8 of notebook 07 has them."""
    speed, folder = read_speed(results), Path(results).name
    compared = comparison(speed.rows, speed.targets)
    verdicts = [target["reached"] for targets in compared["judged"] for target in targets]
    packages = speed.provenance.get("packages") or {}
    versions = [f"PyTorch {speed.provenance.get('torch')}"]
    versions += [f"{name} {packages[name]}" for name in ("triton", "transformers") if packages.get(name)]
    return (
        f"One {speed.provenance.get('device')} with {join_words(versions)}, bf16; medians, "
        "all contestants of a row take turns in one process:\n\n"
        f"{speed_table(compared[compared['judged'].str.len() > 0])}\n\n"
        f"{verdicts.count(True)} of {len(verdicts)} targets are reached. All rows, with peers, spread and memory: "
        f"[`speed.json`](results/{folder}/speed.json); what was tried on the way: "
        "[`benchmarks/LOG.md`](benchmarks/LOG.md). Notebook 07 explains each gain, says what the missed targets lack "
        f"and measures it all on your machine; the fast path trains the same model "
        f"([both curves](figures/{folder}/kernels_curves.svg)).\n"
    )
