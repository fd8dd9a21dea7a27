"""The command: which cells are measured, each in a process of its own, and what is kept of them."""

import importlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcore.device import select_device
from lmcore.errors import require
from lmcore.files import read_json, write_json
from lmcore.profiling.runner import run_apart
from lmcore.provenance import environment
from lmcore.workbook.report.kernels.speed import is_row

from .cells import cells, targets, toy_cells
from .rows import Cell, Conditions, Rows, blank_row
from .table import lines

GRACE = 120.0
"""Seconds beyond its estimate after which a cell is given up."""


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
        out: the JSON file to write, cell by cell; what it holds already is kept.
        only: groups (step, attention, optimizer, loss, decode, sweep, memory, study, elementwise) or cells by name.
        budget: seconds after which no cell is begun that would take longer than what is left.
        seconds: how long the contestants of a cell take turns.
        device: auto, cuda, cuda:N, mps or cpu.
        toy: small sizes, nothing compiled: to try the command; its times mean nothing.
        again: measure cells anew that the file holds.
    """
    began = time.monotonic()
    require(budget is None or 0 <= budget < math.inf, f"--budget is a number of seconds from 0 on, not {budget}.")
    chosen = asked_for(only, toy)
    result = earlier(out, toy)
    outcome, place = run_apart(examined, (device, toy), timeout=None)
    require(outcome == "complete", f"The device cannot be examined: {place}")
    here, others = machine(place), {machine(run) for run in result["runs"]} - {machine(place)}
    require(not others, f"{out} holds measurements of {', '.join(sorted(others))}, not {here}: choose another --out.")
    done = set() if again else {name for run in result["runs"] for name in run["cells"]}
    result["runs"].append(place | {"cells": []})
    conditions = Conditions(place["device"], toy, 0.05 if toy else seconds, place["ceilings"])
    for cell in chosen:
        left = math.inf if budget is None else max(0.0, budget - (time.monotonic() - began))
        if cell.row in done:
            continue
        if left < cell.estimate:
            print(f"{cell.row}: left out, as {left:.0f} s are left and it takes {cell.estimate:.0f} s", flush=True)
            continue
        start = time.monotonic()
        outcome, rows = run_apart(perform, (cell, conditions), min(left, cell.estimate + GRACE))
        if outcome != "complete":  # the cell ended as a whole
            rows = [blank_row(cell, "all", outcome, rows)]
        keep(result, cell, rows)
        write_json(out, result)
        print(f"{cell.row}: {time.monotonic() - start:.0f} s", *lines(rows, ()), sep="\n", flush=True)
    where = f"all in {out}" if out.exists() else "nothing was measured"
    print(f"\n{'-' * 100}", *lines(result["rows"], result["targets"]), where, sep="\n")


def asked_for(only: Sequence[str], toy: bool) -> list[Cell]:
    """The cells of these groups or names, all if none is given. Raises `UserError` on unknown ones."""
    every = toy_cells() if toy else cells()
    known = {cell.group for cell in every} | {cell.row for cell in every}
    unknown = [name for name in only if name not in known]
    require(not unknown, f"There is no group or cell {', '.join(unknown)}; choose from {', '.join(sorted(known))}.")
    return [cell for cell in every if not only or cell.group in only or cell.row in only]


def earlier(out: Path, toy: bool) -> dict[str, Any]:
    """What the file holds, or an empty result. Raises `UserError` rather than mix toy sizes with real ones."""
    wanted = {"targets": [] if toy else targets()}
    if not out.exists():
        return {"provenance": {}, "ceilings": {}, "toy": toy, "runs": [], "rows": []} | wanted
    result = read_json(out)
    whole = isinstance(result, dict) and {"toy", "runs", "rows"} <= result.keys()
    whole = whole and all(map(is_row, result["rows"])) and all(map(is_run, result["runs"]))
    require(whole, f"{out} is not a result of this benchmark.")
    require(result["toy"] == toy, f"{out} holds {'toy' if result['toy'] else 'real'} sizes: choose another --out.")
    return result | wanted


def is_run(run: Any) -> bool:
    """Whether this is what a result says of one run."""
    return isinstance(run, dict) and {"device", "environment", "ceilings", "cells"} <= run.keys()


def machine(run: dict[str, Any]) -> str:
    """The chip of a run, and where on that machine it measured."""
    return f"{run['environment'].get('device')} ({run['device'].partition(':')[0]})"


def examined(device: str, toy: bool) -> dict[str, Any]:
    """In a process of its own: the device, the environment and the ceilings of this run."""
    from lmcore.profiling.peak_rates import peak_rates

    chosen, _ = select_device(device)
    roofs = peak_rates(chosen, "fp32" if toy else "bf16")
    return {
        "device": str(chosen),
        "environment": environment(),
        "ceilings": {
            "copy_bytes_per_second": roofs["peak_bytes_per_second"],
            "bf16_flops_per_second": roofs["peak_flops_per_second"],
        },
    }


def perform(cell: Cell, conditions: Conditions) -> Rows:
    """In the cell's process: its measurement."""
    module, _, function = cell.measure.partition(":")
    return getattr(importlib.import_module(module), function)(cell, conditions)


def keep(result: dict[str, Any], cell: Cell, rows: Rows) -> None:
    """Puts rows into the result in the place of earlier ones of the same names; the cell is done if any is complete.

    `run` of a row is the place of its run, with commit, machine and ceilings, in the result's `runs`. Rows that hold
    no measurement do not take the place of some that do, and then the result's `provenance` and `ceilings` stay, too.
    """
    names, run = {row["row"] for row in rows}, result["runs"][-1]
    if any(row["outcome"] == "complete" for row in rows):
        names.add(cell.row)  # a row of the whole cell, which had failed
        run["cells"].append(cell.row)
        result |= {"provenance": run["environment"], "ceilings": run["ceilings"]}
    else:
        names -= {row["row"] for row in result["rows"] if row["outcome"] == "complete"}
    result["rows"] = [row for row in result["rows"] if row["row"] not in names]
    result["rows"] += [row | {"run": len(result["runs"]) - 1} for row in rows if row["row"] in names]
