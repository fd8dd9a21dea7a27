"""All of a sweep in one table, whatever jobs ran it in whatever order: nothing is lost, nothing there twice."""

import math
import os
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.config import to_dict
from lmcore.errors import UserError
from lmcore.profiling.runner import read_record, task_name
from lmcore.profiling.timing import measure, samples_table, timing_table
from lmcore.run import RunFolder, flatten
from lmcore.workbook.jobs.sweep_definition import SweepDefinition, measured_cells
from lmcore.workbook.jobs.sweeps import cell_states, data_there, expected_runs, run_folder
from lmcore.workbook.report.benchmark.views import readable
from lmcore.workbook.report.tables import (
    curves_table,
    provenance_of,
    provenance_of_cells,
    run_table,
    settings_columns,
    unigram_entropy,
    write_results,
)

MEASURED = (
    "final_valid_loss", "best_valid_loss", "best_step", "diverged_at_step", "max_spike", "seconds",
    "tokens_per_second", "peak_memory_bytes", "device",
)  # fmt: skip
"""Columns of `run_table` that are empty for a run that has not begun."""

SHOWN = ("final_valid_loss", "best_valid_loss", "tokens_per_second", "seconds")
"""Columns of a training sweep that are printed, besides what is varied."""


def write_sweep_table(definition: SweepDefinition, out: str | os.PathLike) -> tuple[pd.DataFrame, Path]:
    """Writes out/results/<name>.json and .csv with a row for each run or measurement; returns the table and the file.

    `outcome` is a state of `sweeps.cell_states`; a run whose loss rose for good is `diverged` as in `run_table`.
    What is in the folder and not in the definition, as of an earlier one, follows with `in_definition` false. The
    curves of training runs go to <name>_curves, the single steps of measurements to <name>_samples.
    """
    out = Path(out)
    file = out / "results" / f"{definition.name}.json"
    notes = {"sweep": {"name": definition.name, "about": definition.about, "kind": definition.kind}}
    write = write_training if definition.kind == "train" else write_measured
    return write(definition, out, file, notes), file


def write_training(definition: SweepDefinition, out: Path, file: Path, notes: dict[str, Any]) -> pd.DataFrame:
    """The table of a training sweep, and its curves."""
    data, states = data_there(definition, out), cell_states(definition, out)
    entropy = unigram_entropy(data) if data else math.inf
    keys = dict.fromkeys(key for _, settings in definition.varied() for key in settings)
    rows, runs = [], {}
    for (name, config), (_, settings) in zip(expected_runs(definition, data), definition.varied(), strict=True):
        (state, reason), run = states[name], run_folder(out, name)
        row = run_row(run, entropy) if state != "not run" else None
        if row is not None:
            runs[name] = run
            state = "diverged" if (state, row["outcome"]) == ("complete", "diverged") else state
        else:
            row = {**settings_columns(name, config, 0), "outcome": state, **dict.fromkeys(MEASURED)}
        values = flatten(to_dict(config)) | definition.base | settings
        row |= {
            key: str(values.get(key)) if isinstance(values.get(key), list | dict) else values.get(key) for key in keys
        }
        rows.append(row | {"outcome": state, "reason": reason, "in_definition": True})
    for folder in sorted((out / "runs").glob("[!.]*")):
        if folder.name not in runs and (row := run_row(RunFolder(folder), entropy)):
            rows.append(row | {"reason": None, "in_definition": False})
            runs[folder.name] = RunFolder(folder)
    notes |= {"unigram_entropy": entropy if data else None, "floor_nats_per_token": data and data.floor_nats_per_token}
    source = provenance_of(runs)
    write_results(curves_table(runs), file.with_stem(f"{file.stem}_curves"), source, **notes)
    return write_results(pd.DataFrame(rows), file, source, **notes)


def run_row(run: RunFolder, entropy: float) -> dict[str, Any] | None:
    """What `run_table` says of a run; None if it has not begun or its files are damaged."""
    try:
        return run_table({run.name: run}, entropy).to_dict("records")[0] if run.config_file.exists() else None
    except UserError:
        return None


def write_measured(definition: SweepDefinition, out: Path, file: Path, notes: dict[str, Any]) -> pd.DataFrame:
    """The table of a benchmark sweep, and its samples."""
    states, records = cell_states(definition, out), {}
    found = {path.stem: read_record(path) for path in sorted((out / "cells").glob("[!.]*.json"))}
    others = {name: record for name, record in found.items() if record and record["task"] == task_name(measure)}
    for name, config in measured_cells(definition).items():
        state, reason = states[name]
        record = {"cell": name, "config": to_dict(config), "result": None, "environment": None}
        if name in others and state == others[name]["outcome"]:
            record = others.pop(name)
        records[name] = record | {"outcome": state, "reason": reason}
    table = pd.concat([timing_table(part) for part in (records, others) if part], ignore_index=True)
    table["in_definition"] = [True] * len(records) + [False] * len(others)
    every = [*records.values(), *others.values()]
    measured = {number: record for number, record in enumerate(every) if record["result"]}
    source = provenance_of_cells(measured)
    write_results(samples_table(measured), file.with_stem(f"{file.stem}_samples"), source, **notes)
    return write_results(table, file, source, **notes)


def summary(definition: SweepDefinition, table: pd.DataFrame) -> str:
    """The table for the terminal, how many ended how, and why those that failed did."""
    if definition.kind == "benchmark":
        shown = readable(table)
        shown.insert(0, "cell", table["cell"])
    else:
        varied = list(definition.vary)  # named runs say by their names how they differ
        shown = table[["name", *varied, "outcome", *SHOWN]].rename(columns={"name": "cell"})
        shown = shown.astype(object).where(shown.notna(), "–")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in table["outcome"].value_counts().items())
    failed = table[table["outcome"] == "failed"]
    reasons = [f"{name}: {reason}" for name, reason in zip(failed.iloc[:, 0], failed["reason"], strict=True)]
    others = int((~table["in_definition"].astype(bool)).sum())
    also = f" {others} of them are not, or no longer, in the definition." if others else ""
    head = f"{definition.name}: {len(table)} cells: {counts}.{also}"
    return "\n".join([shown.to_string(index=False), "", head, *reasons])
