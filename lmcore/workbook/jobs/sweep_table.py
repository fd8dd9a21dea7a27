"""All cells of a sweep in one table, whatever jobs ran them in whatever order: nothing is lost, nothing there twice."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.config import TrainConfig, to_dict
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

OF_A_BEGUN_RUN = (
    "final_valid_loss", "best_valid_loss", "best_step", "diverged_at_step", "max_spike", "seconds",
    "tokens_per_second", "peak_memory_bytes", "device",
)  # fmt: skip
"""Columns of `run_table` that are empty for a run that has not begun."""

SHOWN = ("final_valid_loss", "best_valid_loss", "tokens_per_second", "seconds")
"""Columns of a training sweep that are printed, besides what is varied."""


def write_sweep_table(definition: SweepDefinition, out: str | os.PathLike) -> tuple[pd.DataFrame, Path]:
    """Writes out/results/<name>.json and .csv with one row for each cell; returns the table and the file.

    `outcome` is one of `sweeps.STATES`; a run whose loss rose for good is `diverged` as in `run_table`.
    Cells in the folder that the definition does not have, as those of an earlier one, follow with `in_definition`
    false. The curves of training runs go to <name>_curves, the single steps of measurements to <name>_samples.
    """
    out = Path(out)
    file = out / "results" / f"{definition.name}.json"
    notes = {"sweep": {"name": definition.name, "about": definition.about, "kind": definition.kind}}
    write = write_training if definition.kind == "train" else write_measured
    return write(definition, out, file, notes), file


def write_training(definition: SweepDefinition, out: Path, file: Path, notes: Mapping[str, Any]) -> pd.DataFrame:
    """The table of a training sweep, and its curves."""
    data = data_there(definition, out)
    states = cell_states(definition, out)
    entropy = unigram_entropy(data) if data else math.inf
    varied = {name: settings for name, (_, settings) in zip(states, definition.varied(), strict=True)}
    rows, runs = [], {}
    for name, config in expected_runs(definition, data):
        (state, reason), run = states[name], run_folder(out, name)
        begun = state != "not run" and run.config_file.exists()
        row = run_row(name, run, entropy) if begun else None
        if row is not None:
            runs[name] = run
        else:
            row = planned_row(name, config)
        outcome = row["outcome"] if state == "complete" and row["outcome"] == "diverged" else state
        settings = settings_row(definition, config, varied[name])
        rows.append(row | settings | {"outcome": outcome, "reason": reason, "in_definition": True})
    for folder in sorted((out / "runs").glob("[!.]*")):
        run = RunFolder(folder)
        if folder.name not in runs and run.config_file.exists() and (row := run_row(folder.name, run, entropy)):
            rows.append(row | {"reason": None, "in_definition": False})
            runs.setdefault(folder.name, run)
    known = {"unigram_entropy": entropy if data else None, "floor_nats_per_token": data and data.floor_nats_per_token}
    source, notes = provenance_of(runs), {**notes, **known}
    written = write_results(pd.DataFrame(rows), file, source, **notes)
    write_results(curves_table(runs), file.with_stem(f"{file.stem}_curves"), source, **notes)
    return written


def run_row(name: str, run: RunFolder, entropy: float) -> dict[str, Any] | None:
    """What `run_table` says of a run; None if its files are damaged."""
    try:
        return run_table({name: run}, entropy).to_dict("records")[0]
    except UserError:
        return None


def planned_row(name: str, config: TrainConfig) -> dict[str, Any]:
    """The row of a run of which nothing is known but its configuration."""
    return {**settings_columns(name, config, 0), "outcome": "not run", **dict.fromkeys(OF_A_BEGUN_RUN)}


def settings_row(definition: SweepDefinition, config: TrainConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all settings that the sweep varies, by their dotted names."""
    values = flatten(to_dict(config)) | definition.base | dict(settings)
    keys = dict.fromkeys(key for _, varied in definition.varied() for key in varied)
    return {key: str(value) if isinstance(value := values.get(key), list | dict) else value for key in keys}


def write_measured(definition: SweepDefinition, out: Path, file: Path, notes: Mapping[str, Any]) -> pd.DataFrame:
    """The table of a benchmark sweep, and its samples."""
    folder, states = out / "cells", cell_states(definition, out)
    records: dict[str, dict[str, Any]] = {}
    kept: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("[!.]*.json")):
        record = read_record(path)
        if record is not None and record["task"] == task_name(measure):
            kept[path.stem] = record
    for name, config in measured_cells(definition).items():
        state, reason = states[name]
        same = name in kept and state == kept[name]["outcome"]
        nothing = {"result": None, "environment": None}
        records[name] = kept.pop(name) if same else {"cell": name, "config": to_dict(config), **nothing}
        records[name] |= {"outcome": state, "reason": reason}
    table = pd.concat([timing_table(part) for part in (records, kept) if part], ignore_index=True)
    table.insert(len(table.columns), "in_definition", [True] * len(records) + [False] * len(kept))
    measured = {number: record for number, record in enumerate([*records.values(), *kept.values()]) if record["result"]}
    source = provenance_of_cells(measured)
    write_results(samples_table(measured), file.with_stem(f"{file.stem}_samples"), source, **notes)
    return write_results(table, file, source, **notes)


def summary(definition: SweepDefinition, table: pd.DataFrame) -> str:
    """The table for the terminal, how many cells ended how, and why those that failed did."""
    if definition.kind == "benchmark":
        shown = readable(table)
        shown.insert(0, "cell", table["cell"])
    else:
        varied = list(definition.vary)  # named runs say by their names how they differ
        shown = table[["name", *varied, "outcome", *SHOWN]].rename(columns={"name": "cell"})
        shown = shown.astype(object).where(shown.notna(), "–")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in table["outcome"].value_counts().items())
    first = table.columns[0]
    failed = [f"{row[first]}: {row['reason']}" for row in table.to_dict("records") if row["outcome"] == "failed"]
    others = int((~table["in_definition"].astype(bool)).sum())
    also = f" {others} of them are not, or no longer, in the definition." if others else ""
    count = f"{definition.name}: {len(table)} cells: {counts}.{also}"
    return "\n".join([shown.to_string(index=False), "", count, *failed])
