"""Sweeps as many jobs: each run or measurement by whoever has the task of its number, none twice; one table of all."""

import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.config import TrainConfig, to_dict
from lmcore.data import CorpusConfig, PreparedData, is_prepared, open_data, open_or_prepare
from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, FINISHED, UserError, require
from lmcore.files import locked
from lmcore.profiling.runner import case_lock, is_measured_now, is_of, read_record, run_cases, task_name
from lmcore.profiling.timing import measure, samples_table, timing_table
from lmcore.profiling.workload import WorkloadConfig
from lmcore.run import BUSY, RunBusy, RunFolder, flatten
from lmcore.stopping import Stopped, stop_signals
from lmcore.train import train
from lmcore.workbook.jobs.sweep_definition import (
    SweepDefinition,
    frozen_file,
    load_definition,
    runs_of,
    write_definition,
)
from lmcore.workbook.report import tables
from lmcore.workbook.report.timings import readable
from lmcore.workbook.sweep import run_state, train_each

REMEMBERED = "sweep.yaml"
"""The definition in a sweep's folder, as the latest task had it."""

SHOWN = ("final_valid_loss", "best_valid_loss", "tokens_per_second", "seconds")
"""Columns of a training sweep that are printed, besides what is varied."""


def sweep_folder(definition: SweepDefinition) -> Path:
    """Where a sweep's results go by default."""
    return Path("runs") / "sweeps" / definition.name


def run_folder(out: Path, name: str) -> RunFolder:
    """Folder of one training run of a sweep."""
    return RunFolder(out / "runs" / name)


def run_definition(definition: SweepDefinition, out: str | os.PathLike, task: int | None = None) -> int:
    """Does run or measurement number `task`, or without one all unfinished ones in turn; returns the exit code.

    A finished one is skipped. That one diverges or does not fit into the memory is its result: 0. One that fails is 1,
    and the next ones are done. SIGUSR1 or SIGTERM end with 75 after a training run has saved itself, a second SIGTERM
    at once. Raises `UserError` before anything runs: on a number that there is not, on what is in the folder with other
    settings or data, and on a run that is in other hands; without `task`, a training run is left to them.
    """
    out, names = Path(out), list(runs_of(definition))
    there = task is None or 0 <= task < len(names)
    require(there, f"{definition.name} has tasks 0 to {len(names) - 1}; there is no task {task}.")
    chosen = names if task is None else [names[task]]
    with stop_signals(exits=True) as stop:
        try:
            with stop.raises():
                remember(definition, out)
                if definition.kind == "benchmark":
                    return measure_chosen(definition, out, chosen, shared=task is not None)
                source, tokenizer, documents = definition.corpus.values()
                data = open_or_prepare(source, tokenizer, out / "data", CorpusConfig(num_documents=documents))
        except Stopped:
            print("Stopped; the same command resumes.", flush=True)
            return EXIT_INTERRUPTED
        configs = {name: config for name, config in runs_of(definition, data).items() if name in chosen}
        for name, config in configs.items():
            if (run := run_folder(out, name)).config_file.exists():
                run.require_same(config, data.fingerprint)
        ended = train_each(configs, out / "runs", stop, train_or_note)
    left = task is None or "running" not in ended
    require(left, f"{BUSY} {out / 'runs' / chosen[0]}; wait for it, or leave the run to it.")
    return EXIT_INTERRUPTED if "interrupted" in ended else EXIT_FAILURE if "failed" in ended else 0


def remember(definition: SweepDefinition, out: Path) -> None:
    """Writes the definition into the sweep's folder. Raises `UserError` if that belongs to another sweep."""
    with locked(out / ".sweep.lock", "", -1):
        if check_folder(definition, out) != definition:
            print(f"{out}: the definition has changed; runs of the one before stay, and stay in the table.")
        write_definition(definition, out / REMEMBERED)


def freeze(definition: SweepDefinition, out: Path) -> None:
    """Writes the definition as it is now for the tasks that are submitted. Raises `UserError` if it cannot."""
    write_definition(definition, frozen_file(definition, out))
    remember(definition, out)


def check_folder(definition: SweepDefinition, out: Path) -> SweepDefinition:
    """The definition that the folder remembers, if any. Raises `UserError` if it is of another sweep or other data."""
    before = load_definition(out / REMEMBERED) if (out / REMEMBERED).exists() else definition
    same = (before.name, before.kind) == (definition.name, definition.kind)
    require(same, f"{out} holds the {before.kind} sweep {before.name}; choose another --out for {definition.name}.")
    differ = ", ".join(key for key, value in definition.corpus.items() if before.corpus[key] != value)
    require(not differ, f"{out} holds a sweep with other settings of the data ({differ}); choose another --out.")
    return before


def train_or_note(config: TrainConfig, run: RunFolder) -> str:
    """How the run ended; `failed` is noted in its folder, with the reason. Raises `RunBusy`."""
    try:
        return train(config, run).state
    except RunBusy:
        raise
    except Exception as error:
        reason = str(error)
        if not isinstance(error, UserError):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {(reason.strip() or 'no message').splitlines()[0]}"
    print(f"{run.name}: failed: {reason}", file=sys.stderr, flush=True)
    with suppress(UserError), run.lock():
        run.write_status("failed", run.last_known()[1], reason=reason)
    return "failed"


def measure_chosen(definition: SweepDefinition, out: Path, names: list[str], shared: bool) -> int:
    """Measures the named cases, each in a process of its own; returns the exit code.

    With `shared`, beside other tasks that have GPUs of their own. What another machine has measured is finished too.
    """
    for name, (state, reason) in run_states(definition, out).items():
        if name in names and state == "not run" and reason:
            print(f"{name}: {reason}", flush=True)
    cases = {name: config for name, config in runs_of(definition).items() if name in names}
    records = run_cases(measure, cases, out / "cases", definition.name, reuse_other_machine=True, shared=shared)
    failed = {name: record["reason"] for name, record in records.items() if record["outcome"] not in FINISHED}
    for name, reason in failed.items():
        print(f"{name}: failed: {reason}", file=sys.stderr, flush=True)
    return EXIT_FAILURE if failed else 0


# What has been done


def unfinished(definition: SweepDefinition, out: str | os.PathLike) -> list[int]:
    """Numbers of what has not ended with these settings. Raises `UserError` if `out` is another sweep's."""
    check_folder(definition, Path(out))
    states = run_states(definition, out)
    return [number for number, (state, _) in enumerate(states.values()) if state not in FINISHED]


def run_states(definition: SweepDefinition, out: str | os.PathLike) -> dict[str, tuple[str, str | None]]:
    """Of each run or measurement, by name and in order, its state, and why where there is something to say.

    States: not run, running, stopped (begun, and neither ended nor in anyone's hands), failed, and those `FINISHED`.
    """
    out = Path(out)
    if definition.kind == "benchmark":
        return {name: measured_state(name, case, out / "cases") for name, case in runs_of(definition).items()}
    data = data_there(definition, out)
    return {name: run_state(config, run_folder(out, name), data) for name, config in runs_of(definition, data).items()}


def data_there(definition: SweepDefinition, out: Path) -> PreparedData | None:
    """The sweep's corpus if it is prepared already."""
    for folder in (Path(definition.corpus["data"]), out / "data"):
        with suppress(UserError):  # damaged: it will be prepared again
            if is_prepared(folder):
                return open_data(folder)
    return None


def measured_state(name: str, config: WorkloadConfig, folder: Path) -> tuple[str, str | None]:
    """State of a measurement and why."""
    file = folder / f"{name}.json"
    if is_measured_now(folder, name):
        return "running", None
    if (record := read_record(file)) is not None:
        same = is_of(record, task_name(measure), config)
        reason = "It was measured with other settings, and is measured again."
        return (record["outcome"], record["reason"]) if same else ("not run", reason)
    if file.exists():
        return "not run", f"The record {file.name} is damaged; the run is measured again."
    return "stopped" if case_lock(folder, name).exists() else "not run", None


# One table of it


def write_sweep_table(definition: SweepDefinition, out: str | os.PathLike) -> tuple[pd.DataFrame, Path]:
    """Writes out/results/<name>.json and .csv with a row for each run or measurement; returns the table and the file.

    `outcome` is a state of `run_states`; a run whose loss rose for good is `diverged` as in `run_table`. What is in
    the folder and not in the definition, as of an earlier one, follows with `in_definition` false. The curves of
    training runs go to <name>_curves, the single steps of measurements to <name>_samples.
    """
    train = definition.kind == "train"
    table, details, source, notes = (training_tables if train else measured_tables)(definition, Path(out))
    notes["sweep"] = {"name": definition.name, "about": definition.about, "kind": definition.kind}
    file = Path(out) / "results" / f"{definition.name}.json"
    details_file = file.with_stem(f"{definition.name}_{'curves' if train else 'samples'}")
    tables.write_results(details, details_file, source, **notes)
    return tables.write_results(table, file, source, **notes), file


Tables = tuple[pd.DataFrame, pd.DataFrame, dict[str, Any], dict[str, Any]]
"""The table of a sweep, its details, their provenance, and notes."""


def training_tables(definition: SweepDefinition, out: Path) -> Tables:
    """The table of a training sweep and its curves."""
    data = data_there(definition, out)
    folders = {folder.name: RunFolder(folder) for folder in sorted((out / "runs").glob("[!.]*"))}
    begun, planned = {}, {}
    for name, run in folders.items():
        with suppress(UserError):  # damaged: a row without results
            begun |= {name: tables.run_row(name, run)} if run.config_file.exists() else {}
    varied, nothing = definition.varied(), RunFolder(out / "runs" / ".planned")
    for (name, config), (_, settings) in zip(runs_of(definition, data).items(), varied, strict=True):
        values = flatten(to_dict(config)) | definition.base | settings
        own = {key: values.get(key) for _, others in varied for key in others}
        own = {key: str(value) if isinstance(value, list | dict) else value for key, value in own.items()}
        planned[name] = tables.run_row(name, nothing, config) | own
    rows = joined(planned, begun, run_states(definition, out))
    runs = {row["name"]: folders[row["name"]] for row in rows if row["name"] in begun}
    floors = (tables.unigram_entropy(data), data.floor_nats_per_token) if data else (None, None)
    notes = dict(zip(("unigram_entropy", "floor_nats_per_token"), floors, strict=True))
    return pd.DataFrame(rows), tables.curves_table(runs), tables.provenance_of(runs), notes


def measured_tables(definition: SweepDefinition, out: Path) -> Tables:
    """The table of a benchmark sweep and its samples."""
    states, found = run_states(definition, out), {}
    for file in sorted((out / "cases").glob("[!.]*.json")):
        record = read_record(file)
        if record and record["task"] == task_name(measure) and states.get(file.stem, ("",))[0] != "running":
            found[file.stem] = record
    planned: dict[str, dict[str, Any]] = {
        name: {"case": name, "config": to_dict(config), "result": None, "environment": None}
        for name, config in runs_of(definition).items()
    }
    rows = dict(enumerate(joined(planned, found, states)))
    measured = {number: row for number, row in rows.items() if row["result"]}
    table = timing_table(rows).assign(in_definition=[row["in_definition"] for row in rows.values()])
    return table, samples_table(measured), tables.provenance_of_cases(measured), {}


def joined(planned: dict[str, dict], found: dict[str, dict], states: Mapping[str, tuple]) -> list[dict[str, Any]]:
    """What is planned, in order, each with what was found of it; then what was found besides."""
    rows, others = [], dict(found)
    for name, (state, reason) in states.items():
        row = planned[name] | (others.pop(name, {}) if state != "not run" else {})
        outcome = "diverged" if (state, row.get("outcome")) == ("complete", "diverged") else state
        rows.append(row | {"outcome": outcome, "reason": reason, "in_definition": True})
    return rows + [{"reason": None} | row | {"in_definition": False} for row in others.values()]


def summary(definition: SweepDefinition, table: pd.DataFrame) -> str:
    """The table for the terminal, how many ended how, and why those that failed did."""
    if definition.kind == "benchmark":
        shown = readable(table)
        shown.insert(0, "run", table["case"])
    else:
        varied = list(definition.vary)  # named runs say by their names how they differ
        shown = table[["name", *varied, "outcome", *SHOWN]].rename(columns={"name": "run"})
        shown = shown.astype(object).where(shown.notna(), "–")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in table["outcome"].value_counts().items())
    failed = table["outcome"] == "failed"
    reasons = [f"{name}: {reason}" for name, reason in zip(shown["run"][failed], table["reason"][failed], strict=True)]
    others = int((~table["in_definition"].astype(bool)).sum())
    also = f" {others} of them are not, or no longer, in the definition." if others else ""
    head = f"\n{definition.name}: {len(table)} runs: {counts}.{also}"
    return "\n".join([shown.to_string(index=False), head, *reasons])
