"""Sweeps as many jobs: each cell by whoever has the task of its number, none twice, none by two at once."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from lmcore.config import TrainConfig, replace
from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED, UserError, require
from lmcore.run import RunBusy, RunFolder, damage
from lmcore.stopping import STOP_SIGNALS, stop_signals
from lmcore.workbook.jobs.sweep_definition import (
    SweepDefinition,
    cell_names,
    load_definition,
    measured_cells,
    train_cells,
    write_definition,
)

if TYPE_CHECKING:  # PyTorch is imported when cells are run
    from lmcore.data import PreparedData

__all__ = ["SweepDefinition", "cell_names", "cell_states", "load_definition", "run_definition", "unfinished"]

REMEMBERED = "sweep.yaml"
"""The definition in a sweep's folder, as the latest task had it."""

FINISHED = ("complete", "diverged", "out of memory")
STATES = ("not run", "running", "stopped", "failed", *FINISHED)
"""What can be said of a cell. stopped: begun, and neither ended nor in anyone's hands; a training run goes on."""


def sweep_folder(definition: SweepDefinition) -> Path:
    """Where a sweep's cells go by default."""
    return Path("runs") / "sweeps" / definition.name


def run_definition(definition: SweepDefinition, out: str | os.PathLike, task: int | None = None) -> int:
    """Does cell number `task`, or without one all unfinished cells in turn; returns the exit code.

    A finished cell is skipped. That one diverges or does not fit into the memory is its result: 0. A cell that fails
    is 1, and the next ones are done. SIGUSR1 or SIGTERM end with 75 after a training run has saved itself, a second
    SIGTERM at once. Raises
    `UserError` before anything runs: on cells in the folder that were made with other settings or data, and on one
    that is in other hands; without `task`, such a training run is left to them.
    """
    out, names = Path(out), cell_names(definition)
    require(task is None or task >= 0, f"A task's number counts from 0, it cannot be {task}.")
    if task is not None and task >= len(names):
        print(f"{definition.name}: has {len(names)} cells, numbered from 0; task {task} has nothing to do.")
        return 0
    do = train_chosen if definition.kind == "train" else measure_chosen
    with stopped_by_signals():
        remember(definition, out)
        return do(definition, out, names if task is None else [names[task]], task is None)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Stop signals end this process with code 75; where runs are trained, `stop_signals` is used instead."""

    def stop(number: int, _: Any) -> None:
        for again in STOP_SIGNALS:  # the same one may come twice, and is not to disturb what is put away now
            signal.signal(again, signal.SIG_IGN)
        print(f"Stopped by {signal.Signals(number).name}; the same command goes on.", flush=True)
        raise SystemExit(EXIT_INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def check_folder(definition: SweepDefinition, out: Path) -> SweepDefinition | None:
    """The definition that the folder remembers. Raises `UserError` if it is of another sweep or on other data."""
    before = remembered(out)
    if before is None:
        return None
    same = (before.name, before.kind) == (definition.name, definition.kind)
    require(same, f"{out} holds the {before.kind} sweep {before.name}; choose another --out for {definition.name}.")
    differ = [key for key, value in definition.corpus.items() if before.corpus[key] != value]
    require(
        definition.kind != "train" or not differ,
        f"{out} holds a sweep with other settings of the data ({', '.join(differ)}); choose another --out.",
    )
    return before


def remembered(out: Path) -> SweepDefinition | None:
    """The definition in a sweep's folder, None if there is none. Raises `UserError` if it is damaged."""
    return load_definition(out / REMEMBERED) if (out / REMEMBERED).exists() else None


def require_remembered(out: str | os.PathLike) -> SweepDefinition:
    """The definition in a sweep's folder. Raises `UserError` if there is none."""
    found = remembered(Path(out))
    if found is None:
        raise UserError(f"{out} holds no sweep (it has no {REMEMBERED}); name its folder, or give --definition.")
    return found


def train_chosen(definition: SweepDefinition, out: Path, names: Sequence[str], others_may: bool) -> int:
    """Trains the named runs in turn; returns the exit code."""
    from lmcore.data import CorpusConfig, open_or_prepare

    corpus = definition.corpus
    data = open_or_prepare(
        corpus["data"], corpus["tokenizer"], out / "data", CorpusConfig(num_documents=corpus["num_documents"])
    )
    cells = train_cells(definition, str(data.folder), data.vocab_size)
    states = {name: train_state(cells[name], run_folder(out, name), data) for name in names}
    for name in names:
        run = run_folder(out, name)
        if run.config_file.exists():
            run.require_same(cells[name], data.fingerprint)
    ended = []
    with stop_signals(exits=True) as stop:
        for name in names:
            if states[name][0] in FINISHED:
                print(f"{name}: skipped, it is finished: {states[name][0]}.", flush=True)
                continue
            try:
                ended.append(train_one(cells[name], run_folder(out, name)))
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
    """Measures the named cells, each in a process of its own; returns the exit code.

    `alone` in the folder, or beside other tasks that have GPUs of their own. What another machine has measured is
    finished too.
    """
    from lmcore.profiling.runner import FINISHED as MEASURED
    from lmcore.profiling.runner import is_of, read_record, run_cases, task_name
    from lmcore.profiling.timing import measure

    cells = {name: config for name, config in measured_cells(definition).items() if name in names}
    for name, config in cells.items():
        record = read_record(out / "cells" / f"{name}.json")
        if record is not None and not is_of(record, task_name(measure), config):
            print(f"{name}: was measured with other settings, and is measured again.", flush=True)
    records = run_cases(measure, cells, out / "cells", definition.name, reuse_other_machine=True, shared=not alone)
    for name, record in records.items():
        if record["outcome"] not in MEASURED:
            print(f"{name}: failed: {record['reason']}", file=sys.stderr, flush=True)
    return 0 if all(record["outcome"] in MEASURED for record in records.values()) else EXIT_FAILURE


def unfinished(definition: SweepDefinition, out: str | os.PathLike) -> list[int]:
    """Numbers of the cells that have not ended with these settings. Raises `UserError` if `out` is another sweep's."""
    check_folder(definition, Path(out))
    states = cell_states(definition, out)
    return [number for number, (state, _) in enumerate(states.values()) if state not in FINISHED]


def cell_states(definition: SweepDefinition, out: str | os.PathLike) -> dict[str, tuple[str, str | None]]:
    """Of each cell, by name and in order, its state (`STATES`), and why where there is something to say."""
    out = Path(out)
    if definition.kind == "benchmark":
        cells = measured_cells(definition)
        return {name: measured_state(name, config, out / "cells") for name, config in cells.items()}
    data = data_there(definition, out)
    return {name: train_state(config, run_folder(out, name), data) for name, config in expected_runs(definition, data)}


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


def train_state(config: TrainConfig, run: RunFolder, data: "PreparedData | None") -> tuple[str, str | None]:
    """State of a training run and why; without the data, those that the run was made with are taken for the same."""
    try:
        if run.is_busy():
            return "running", None
        status = run.status()
        if run.config_file.exists():
            if data is None:
                config = replace(config, model__vocab_size=run.config().model.vocab_size)
            differences = run.differences(config, data.fingerprint if data else run.data_fingerprint())
            if differences:
                return "not run", f"The run folder was made with other settings: {', '.join(differences)}."
        elif status["state"] != "failed":
            return "not run", None
    except UserError as error:
        return "failed", str(error)
    state = status["state"]
    if state == "complete" and (reason := damage(run)):
        return "stopped", f"{reason} Training again mends it."
    return (state if state in STATES and state != "running" else "stopped"), status.get("reason")


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
