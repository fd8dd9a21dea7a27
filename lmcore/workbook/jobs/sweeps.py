"""Sweeps as many jobs: each run or measurement by whoever has the task of its number, none twice, none by two."""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from lmcore.config import TrainConfig, replace
from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, FINISHED, UserError, require
from lmcore.run import RunBusy, RunFolder
from lmcore.stopping import StopEvent, Stopped, stop_signals
from lmcore.workbook.jobs.sweep_definition import (
    SweepDefinition,
    cell_names,
    frozen_file,
    load_definition,
    measured_cells,
    train_cells,
    write_definition,
)
from lmcore.workbook.sweep import run_state

if TYPE_CHECKING:  # PyTorch is imported when something is run
    from lmcore.data import PreparedData

REMEMBERED = "sweep.yaml"
"""The definition in a sweep's folder, as the latest task had it."""


def sweep_folder(definition: SweepDefinition) -> Path:
    """Where a sweep's results go by default."""
    return Path("runs") / "sweeps" / definition.name


def run_definition(definition: SweepDefinition, out: str | os.PathLike, task: int | None = None) -> int:
    """Does run or measurement number `task`, or without one all unfinished ones in turn; returns the exit code.

    A finished one is skipped. That one diverges or does not fit into the memory is its result: 0. One that fails is 1,
    and the next ones are done. SIGUSR1 or SIGTERM end with 75 after a training run has saved itself, a second SIGTERM
    at once. Raises `UserError` before anything runs: on a number that there is not, on what is in the folder with other
    settings or data, and on a run that is in other hands; without `task`, a training run is left to them.
    """
    out, names = Path(out), cell_names(definition)
    require(task is None or task >= 0, f"A task's number counts from 0, it cannot be {task}.")
    last = len(names) - 1
    require(task is None or task <= last, f"{definition.name} has tasks 0 to {last}; there is no task {task}.")
    chosen = names if task is None else [names[task]]
    with stop_signals(exits=True) as stop:
        try:
            with stop.raises():
                remember(definition, out)
                if definition.kind == "benchmark":
                    return measure_chosen(definition, out, chosen, task is None)
                data = prepared(definition, out)
        except Stopped:
            print("Stopped; the same command goes on.", flush=True)
            return EXIT_INTERRUPTED
        return train_chosen(definition, out, data, chosen, task is None, stop)


def remember(definition: SweepDefinition, out: Path) -> None:
    """Writes the definition into the sweep's folder. Raises `UserError` if that belongs to another sweep."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".sweep.lock"):
            before = check_folder(definition, out)
            if before is not None and before != definition:
                print(f"{out}: the definition has changed; cells of the one before stay, and stay in the table.")
            if before != definition:
                write_definition(definition, out / REMEMBERED)
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror or error}.") from error


def freeze(definition: SweepDefinition, out: Path) -> None:
    """Writes the definition as it is now for the tasks that are submitted. Raises `UserError` if it cannot."""
    write_definition(definition, frozen_file(definition, out))
    remember(definition, out)


def check_folder(definition: SweepDefinition, out: Path) -> SweepDefinition | None:
    """The definition that the folder remembers. Raises `UserError` if it is of another sweep or on other data."""
    if not (out / REMEMBERED).exists():
        return None
    before = remembered(out)
    same = (before.name, before.kind) == (definition.name, definition.kind)
    require(same, f"{out} holds the {before.kind} sweep {before.name}; choose another --out for {definition.name}.")
    differ = [key for key, value in definition.corpus.items() if before.corpus[key] != value]
    require(
        definition.kind != "train" or not differ,
        f"{out} holds a sweep with other settings of the data ({', '.join(differ)}); choose another --out.",
    )
    return before


def remembered(out: Path) -> SweepDefinition:
    """The definition in a sweep's folder. Raises `UserError` if there is none, or it is damaged."""
    sentence = f"{out} holds no sweep (it has no {REMEMBERED}); name its folder, or give --definition."
    require((out / REMEMBERED).exists(), sentence)
    return load_definition(out / REMEMBERED)


def prepared(definition: SweepDefinition, out: Path) -> "PreparedData":
    """The sweep's corpus, which is prepared if it is not yet."""
    from lmcore.data import CorpusConfig, open_or_prepare

    corpus = definition.corpus
    settings = CorpusConfig(num_documents=corpus["num_documents"])
    return open_or_prepare(corpus["data"], corpus["tokenizer"], out / "data", settings)


def train_chosen(
    definition: SweepDefinition,
    out: Path,
    data: "PreparedData",
    names: Sequence[str],
    others_may: bool,
    stop: StopEvent,
) -> int:
    """Trains the named runs in turn; returns the exit code."""
    configs = train_cells(definition, str(data.folder), data.vocab_size)
    runs = {name: run_folder(out, name) for name in names}
    states = {name: run_state(configs[name], run, data.fingerprint)[0] for name, run in runs.items()}
    for name, run in runs.items():
        if run.config_file.exists():
            run.require_same(configs[name], data.fingerprint)
    ended = []
    for name, run in runs.items():
        if states[name] in FINISHED:
            print(f"{name}: skipped, it is finished: {states[name]}.", flush=True)
            continue
        try:
            ended.append(train_one(configs[name], run))
        except RunBusy:
            if not others_may:
                raise
            print(f"{name}: left to the process that is training it.", flush=True)
        if stop.is_set() and (name != names[-1] or "interrupted" in ended):
            return EXIT_INTERRUPTED
    return EXIT_FAILURE if "failed" in ended else 0


def train_one(config: TrainConfig, run: RunFolder) -> str:
    """How the run ended; `failed` is noted in its folder, with the reason. Raises `RunBusy`."""
    from lmcore.train import train

    try:
        return train(config, run).state
    except RunBusy:
        raise
    except Exception as error:
        if isinstance(error, UserError):
            reason = str(error)
        else:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    print(f"{run.name}: failed: {reason}", file=sys.stderr, flush=True)
    with suppress(UserError), run.lock():
        run.write_status("failed", run.status()["step"], reason=reason)
    return "failed"


def measure_chosen(definition: SweepDefinition, out: Path, names: Sequence[str], alone: bool) -> int:
    """Measures the named cases, each in a process of its own; returns the exit code.

    `alone` in the folder, or beside other tasks that have GPUs of their own. What another machine has measured is
    finished too.
    """
    from lmcore.profiling.runner import is_of, read_record, run_cases, task_name
    from lmcore.profiling.timing import measure

    cells = {name: config for name, config in measured_cells(definition).items() if name in names}
    for name, config in cells.items():
        record = read_record(out / "cells" / f"{name}.json")
        if record is not None and not is_of(record, task_name(measure), config):
            print(f"{name}: was measured with other settings, and is measured again.", flush=True)
    records = run_cases(measure, cells, out / "cells", definition.name, reuse_other_machine=True, shared=not alone)
    failed = {name: record["reason"] for name, record in records.items() if record["outcome"] not in FINISHED}
    for name, reason in failed.items():
        print(f"{name}: failed: {reason}", file=sys.stderr, flush=True)
    return EXIT_FAILURE if failed else 0


def unfinished(definition: SweepDefinition, out: str | os.PathLike) -> list[int]:
    """Numbers of what has not ended with these settings. Raises `UserError` if `out` is another sweep's."""
    check_folder(definition, Path(out))
    states = cell_states(definition, out)
    return [number for number, (state, _) in enumerate(states.values()) if state not in FINISHED]


def cell_states(definition: SweepDefinition, out: str | os.PathLike) -> dict[str, tuple[str, str | None]]:
    """Of each run or measurement, by name and in order, its state, and why where there is something to say.

    States: not run, running, stopped (begun, and neither ended nor in anyone's hands), failed, and those `FINISHED`.
    """
    out = Path(out)
    if definition.kind == "benchmark":
        cells = measured_cells(definition)
        return {name: measured_state(name, config, out / "cells") for name, config in cells.items()}
    data = data_there(definition, out)
    states = {}
    for name, config in expected_runs(definition, data):
        run, fingerprint = run_folder(out, name), data.fingerprint if data else None
        with suppress(UserError):  # without the data, those that the run was made with are taken for the same
            if data is None and run.config_file.exists():
                config = replace(config, model__vocab_size=run.config().model.vocab_size)
                fingerprint = run.data_fingerprint()
        states[name] = run_state(config, run, fingerprint)
    return states


def expected_runs(definition: SweepDefinition, data: "PreparedData | None") -> list[tuple[str, TrainConfig]]:
    """Names and configurations of the runs, on the data if they are there."""
    known: Mapping[str, Any] = {} if data is None else {"data": str(data.folder), "vocab_size": data.vocab_size}
    return list(train_cells(definition, **known).items())


def data_there(definition: SweepDefinition, out: Path) -> "PreparedData | None":
    """The sweep's corpus if it is prepared already."""
    from lmcore.data import is_prepared, open_data

    found = next((folder for folder in (Path(definition.corpus["data"]), out / "data") if is_prepared(folder)), None)
    with suppress(UserError):  # damaged: it will be prepared again
        return found and open_data(found)
    return None


def run_folder(out: Path, name: str) -> RunFolder:
    """Folder of one training run of a sweep."""
    return RunFolder(out / "runs" / name)


def measured_state(name: str, config: Any, folder: Path) -> tuple[str, str | None]:
    """State of a measurement and why."""
    from lmcore.profiling.runner import case_lock, is_measured_now, is_of, read_record, task_name
    from lmcore.profiling.timing import measure

    file = folder / f"{name}.json"
    if is_measured_now(folder, name):
        return "running", None
    record = read_record(file)
    if record is None:
        if file.exists():
            return "not run", f"The record {file.name} is damaged; the cell is measured again."
        return ("stopped" if case_lock(folder, name).exists() else "not run"), None
    if not is_of(record, task_name(measure), config):
        return "not run", "It was measured with other settings."
    return record["outcome"], record["reason"]
