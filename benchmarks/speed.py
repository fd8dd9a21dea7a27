"""Speed of lmcore beside what else its users could pick, on one device, in one run.

    python benchmarks/speed.py                       # everything that there is time for, to results/h200/speed.json
    python benchmarks/speed.py --only step decode    # some groups, or cases by name
    python benchmarks/speed.py --toy --out runs/toy/speed.json

A case is one piece of work: its contestants are built, checked against the reference and then timed turn by turn, in
a process of the case's own. What is done is written down at once and not done again.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from benchmark_cases import BenchmarkCase, Conditions, Rows, all_cases, blank_row, examined, perform, targets, toy_cases
from common import command

from lmcore.errors import require
from lmcore.files import read_json, write_json
from lmcore.profiling.kernels.speed import fastest, judged, rows_table
from lmcore.profiling.runner import run_apart

GRACE = 120.0
"""Seconds beyond its estimate after which a case is given up."""


def main(
    out: Path = Path("results/h200/speed.json"),
    only: tuple[str, ...] = (),
    budget: float | None = None,
    seconds: float = 2.5,
    device: str = "auto",
    toy: bool = False,
    again: bool = False,
) -> None:
    """Measures, prints and writes.

    Args:
        out: the JSON file to write, case by case; what it holds already is kept.
        only: groups (step, attention, optimizer, loss, decode, sweep, memory, study, elementwise) or cases by name.
        budget: seconds after which no case is begun that would take longer than what is left.
        seconds: how long the contestants of a case take turns.
        device: auto, cuda, cuda:N, mps or cpu.
        toy: small sizes, nothing compiled: to try the command; its times mean nothing.
        again: measure cases anew that the file holds.
    """
    began = time.monotonic()
    require(budget is None or 0 <= budget < math.inf, f"--budget is a number of seconds from 0 on, not {budget}.")
    every = toy_cases() if toy else all_cases()
    known = {case.group for case in every} | {case.row for case in every}
    unknown = [name for name in only if name not in known]
    require(not unknown, f"There is no group or case {', '.join(unknown)}; choose from {', '.join(sorted(known))}.")
    result = earlier(out, toy)
    outcome, place = run_apart(examined, (device, toy), timeout=None)
    require(outcome == "complete", f"The device cannot be examined: {place}")
    here, others = machine(place), {machine(run) for run in result["runs"]} - {machine(place)}
    require(not others, f"{out} holds measurements of {', '.join(sorted(others))}, not {here}: choose another --out.")
    done = set() if again else {name for run in result["runs"] for name in run["cases"]}
    result["runs"].append(place | {"cases": []})
    conditions = Conditions(place["device"], toy, 0.05 if toy else seconds, place["peak_rates"])
    for case in every:
        if case.row in done or (only and not {case.group, case.row} & set(only)):
            continue
        left = math.inf if budget is None else max(0.0, budget - (time.monotonic() - began))
        if left < case.estimate:
            print(f"{case.row}: left out, as {left:.0f} s are left and it takes {case.estimate:.0f} s", flush=True)
            continue
        start = time.monotonic()
        outcome, rows = run_apart(perform, (case, conditions), min(left, case.estimate + GRACE))
        if outcome != "complete":  # the case ended as a whole
            rows = [blank_row(case, "all", outcome, rows)]
        keep(result, case, rows)
        write_json(out, result)
        print(f"{case.row}: {time.monotonic() - start:.0f} s", *lines(rows, ()), sep="\n", flush=True)
    where = f"all in {out}" if out.exists() else "nothing was measured"
    print(f"\n{'-' * 100}", *lines(result["rows"], result["targets"]), where, sep="\n")


def earlier(out: Path, toy: bool) -> dict[str, Any]:
    """What the file holds, or an empty result. Raises `UserError` rather than mix toy sizes with real ones."""
    wanted = {"targets": [] if toy else targets()}
    if not out.exists():
        return {"provenance": {}, "peak_rates": {}, "toy": toy, "runs": [], "rows": []} | wanted
    result, keys = read_json(out), {"device", "environment", "peak_rates", "cases"}
    whole = isinstance(result, dict) and {"toy", "runs", "rows"} <= result.keys()
    whole = whole and all(
        isinstance(row, dict) and {"row", "contestant", "ours"} <= row.keys() for row in result["rows"]
    )
    whole = whole and all(isinstance(run, dict) and keys <= run.keys() for run in result["runs"])
    require(whole, f"{out} is not a result of this benchmark.")
    require(result["toy"] == toy, f"{out} holds {'toy' if result['toy'] else 'real'} sizes: choose another --out.")
    return result | wanted


def machine(run: dict[str, Any]) -> str:
    """The chip of a run, and where on that machine it measured."""
    return f"{run['environment'].get('device')} ({run['device'].partition(':')[0]})"


def keep(result: dict[str, Any], case: BenchmarkCase, rows: Rows) -> None:
    """Puts rows into the result in the place of earlier ones of the same names; the case is done if any is complete.

    `run` of a row is the place of its run, with commit, machine and peak rates, in the result's `runs`. Rows that hold
    no measurement do not take the place of some that do, and then the result's `provenance` and `peak rates` stay, too.
    """
    names, run = {row["row"] for row in rows}, result["runs"][-1]
    if any(row["outcome"] == "complete" for row in rows):
        names.add(case.row)  # a row of the whole case, which had failed
        run["cases"].append(case.row)
        result |= {"provenance": run["environment"], "peak_rates": run["peak_rates"]}
    else:
        names -= {row["row"] for row in result["rows"] if row["outcome"] == "complete"}
    result["rows"] = [row for row in result["rows"] if row["row"] not in names]
    result["rows"] += [row | {"run": len(result["runs"]) - 1} for row in rows if row["row"] in names]


def lines(rows: Sequence[Mapping[str, Any]], goals: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of text: each piece of work with its contestants, then a line for each target whose row was measured."""
    if not rows:
        return
    table = rows_table(rows)
    for name, group in table.groupby("row", sort=False):
        ours, peer = fastest(group[group["ours"]]), fastest(group[group["peer"]])
        yield f"{group['work'].iloc[0]}  [{name}]"
        width = max(map(len, group["contestant"])) + 2
        yield from (f"    {row['contestant']:<{width}}{_figures(row, peer)}" for _, row in group.iterrows())
        if ours is not None and peer is not None:
            yield f"    {peer['median'] / ours['median']:.2f} times as fast as the best peer"
    for target in goals:
        result = judged(target, table)
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


if __name__ == "__main__":
    command(main)
