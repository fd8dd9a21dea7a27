"""Speed of lmcore beside what else its users could pick, on one device, in one run.

    python benchmarks/speed.py                       # everything, to results/h200/speed.json
    python benchmarks/speed.py --only step decode    # some groups, or cases by name
    python benchmarks/speed.py --toy --out runs/toy/speed.json

A case is one piece of work: its contestants are built, checked against the reference and then timed turn by turn, in
a process of the case's own. What is done is written down at once and not done again.
"""

import sys
from pathlib import Path
from typing import Any

import tyro
from benchmark_cases import BenchmarkCase, Conditions, Rows, all_cases, blank_row, examined, perform, targets, toy_cases

from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.profiling.runner import run_apart

SECONDS, LIMIT = 2.5, 300.0
"""How long the contestants of a case take turns, and after how long a case is given up."""


def main(
    out: Path = Path("results/h200/speed.json"), only: tuple[str, ...] = (), device: str = "auto", toy: bool = False
) -> None:
    """Measures, prints and writes.

    Args:
        out: the JSON file to write, case by case; what it holds already is kept.
        only: groups (step, recipe, train, attention, host, optimizer, loss, decode, memory) or cases by name.
        device: auto, cuda, cuda:N, mps or cpu.
        toy: small sizes, nothing compiled: to try the command; its times mean nothing.
    """
    every = toy_cases() if toy else all_cases()
    known = {case.group for case in every} | {case.row for case in every}
    unknown = [name for name in only if name not in known]
    require(not unknown, f"There is no group or case {', '.join(unknown)}; choose from {', '.join(sorted(known))}.")
    result: dict[str, Any] = {"provenance": {}, "peak_rates": {}, "toy": toy, "runs": [], "rows": []}
    if out.exists():
        result = read_json(out)
        sizes = "toy" if toy else "real"
        require(result["toy"] == toy, f"{out} does not hold {sizes} sizes: choose another --out.")
    result["targets"] = [] if toy else targets()
    outcome, place = run_apart(examined, (device, toy))
    require(outcome == "complete", f"The device cannot be examined: {place}")
    here, others = place["environment"].get("device"), {run["environment"].get("device") for run in result["runs"]}
    require(others <= {here}, f"{out} holds measurements of another device than {here}: choose another --out.")
    done = {name for run in result["runs"] for name in run["cases"]}
    result["runs"].append(place | {"cases": []})
    conditions = Conditions(place["device"], toy, 0.05 if toy else SECONDS, place["peak_rates"])
    for case in every:
        if case.row in done or (only and not {case.group, case.row} & set(only)):
            continue
        outcome, rows = run_apart(perform, (case, conditions), LIMIT)
        if outcome != "complete":  # the case ended as a whole
            rows = [blank_row(case, "all", outcome, rows)]
        keep(result, case, rows)
        write_json(out, result)
        for row in rows:
            found = f"{row['outcome']}: {row['reason']}" if row["median"] is None else f"{row['median']:.3f} ms"
            found += f", {row['share']:.1%} of {row['share_of']}" if row["share"] else ""
            print(f"{case.row}: {row['contestant']}: {found}", flush=True)
    print(f"all in {out}; `python results/tables.py` makes the tables")


def keep(result: dict[str, Any], case: BenchmarkCase, rows: Rows) -> None:
    """Puts the rows of a case into the result in the place of earlier ones; the case is done if any is complete.

    `run` of a row is the place of its run, with commit, machine and peak rates, in the result's `runs`.
    """
    others, run = [row for row in result["rows"] if row["row"] != case.row], result["runs"][-1]
    if any(row["outcome"] == "complete" for row in rows):
        run["cases"].append(case.row)
        result |= {"provenance": run["environment"], "peak_rates": run["peak_rates"]}
    result["rows"] = others + [row | {"run": len(result["runs"]) - 1} for row in rows]


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except UserError as error:
        sys.exit(str(error))
