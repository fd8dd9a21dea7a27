"""Runs benchmark cases: each in a process of its own, recorded on disk as soon as it ends, never measured twice."""

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from lmcore.config import from_dict, to_dict
from lmcore.device import out_of_memory_reason, require_precision, select_device, visible_gpus
from lmcore.errors import FINISHED, UserError, require
from lmcore.files import atomic_write, is_locked, locked, read_json, write_json
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.plausible import refusal_of
from lmcore.progress import Progress
from lmcore.provenance import command_line, environment
from lmcore.stopping import begin_worker

Task = Callable[[WorkloadConfig, Path], dict[str, Any]]
"""Measures one benchmark case, may write files into the folder it is given, and returns what JSON can hold."""

MACHINE = ("device", "torch")
"""What must be the same of the environment for an old record to stand."""

OLD_TASKS = {
    f"lmcore.{old}": f"lmcore.{new}"
    for old, new in (
        ("report.memory.kept:kept_by_block", "profiling.memory.saved:saved_by_block"),
        ("workbook.report.memory.kept:kept_by_block", "profiling.memory.saved:saved_by_block"),
        ("profiling.kernels.interpreted:measure_interpreted", "profiling.kernels.parity:measure_interpreted"),
        ("profiling.kernels.agreement:measure_interpreted", "profiling.kernels.parity:measure_interpreted"),
        ("profiling.kernels.agreement:measure_agreement", "profiling.kernels.parity:measure_parity"),
        ("profiling.kernels.attention:measure_attention", "profiling.kernels.cases:measure_attention"),
        ("profiling.kernels.elementwise:measure_elementwise", "profiling.kernels.cases:measure_elementwise"),
        ("profiling.kernels.loss:measure_loss", "profiling.kernels.cases:measure_loss"),
        ("profiling.kernels.measuring:measure_ceilings", "profiling.kernels.measuring:device_peak_rates"),
    )
}
"""Names of tasks in records from before the task was moved or renamed → names today. Add a row when you move one."""

OLD_KEYS = {"cell": "case", "passes": "mode", "ceilings": "peak_rates"}
"""Names of keys in older records → names today."""

KILLED = "The system ended the process, as it does when the host's memory is used up (SIGKILL)."

SECONDS_OF_A_SIGNAL = 0.5
"""A signal that ends a case, as Ctrl-C does, reaches the runner's process in this time if it was meant for both."""

SECONDS_TO_END = 1.0
"""How long the process of a case that is stopped has to end what it has started, before all of it is killed."""

SECONDS_OF_A_LOOK = 2.0
"""How long a case may be locked by someone who only looks whether it is being measured."""

PRELOADED = ["lmcore.profiling.runner", "lmcore.profiling.timing", "torch._dynamo"]
"""Modules that are imported once, before the processes of all cases are forked from there. They leave CUDA alone;
the last is what PyTorch's optimizers import when the first one is made."""


def run_cases(
    task: Task,
    cases: Mapping[str, WorkloadConfig],
    folder: str | os.PathLike,
    title: str = "cases",
    reuse_other_machine: bool = False,
    shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measures every benchmark case with `task` and returns the records by name, in order.

    Cases run one at a time, or with several GPUs one at a time on each. Each has a fresh process, so that a lack of
    memory is its outcome and the next one starts clean. A record {case, task, config, outcome, reason, seconds,
    result, environment} is written to folder/<name>.json as each case ends; the task's own files go to folder/<name>/.
    A measurement that arithmetic forbids has failed (`lmcore.profiling.plausible`).
    Cases that are complete or out of memory, with the same task, configuration, device and PyTorch, are not measured
    again; with `reuse_other_machine`, neither are those of another machine: what a cluster measured is then read on a
    laptop.

    One process measures in a folder. With `shared`, as for the jobs of a cluster that each have a GPU of their own,
    others may measure other cases there at the same time; no case is ever measured by two.

    Raises `UserError`, before anything runs, on names that are no file names, on tasks that cannot be imported and
    where a case's device is not there or does not compute in its precision; and when another process holds the folder
    or a case.
    """
    folder, name_of_task = Path(folder), task_name(task)
    for name in cases:
        require(re.fullmatch(r"\w[\w.+-]*", name) is not None, f"A case's name must be a file name, not {name!r}.")
    if not cases:
        return {}
    wanted = sorted({(case.device, case.precision) for case in cases.values()})
    outcome, found = run_apart(examine, (wanted,))  # this process is not to hold a GPU
    require(outcome == "complete", f"The machine cannot be examined: {found}")
    machine, refusals = found[0] | {"command": command_line()}, found[1]
    required = {} if reuse_other_machine else {key: machine.get(key) for key in MACHINE}

    def finished(name: str) -> dict[str, Any] | None:
        record = read_record(folder / f"{name}.json")
        if record is None or record["outcome"] not in FINISHED or not is_of(record, name_of_task, cases[name]):
            return None
        stands = required.items() <= record["environment"].items() and not refusal_of(cases[name], record["result"])
        return record if stands else None

    records = {name: finished(name) for name in cases}
    missing = [name for name, record in records.items() if record is None]
    if reused := len(cases) - len(missing):
        print(f"{title}: {reused} of {len(cases)} cases reused.", flush=True)
    if not missing:
        return records
    for name in missing:
        require(not (refusal := refusals.get((cases[name].device, cases[name].precision))), str(refusal))
    with atomic_write(folder / ".writable"):  # makes the folder, or says that it cannot be written to
        pass
    (folder / ".writable").unlink(missing_ok=True)
    progress, stopped = Progress(len(cases), title, unit="case", start=reused), threading.Event()

    def measure_on(gpu: str | None, names: Iterator[str]) -> None:
        for name in names:  # shared by the threads of all GPUs
            if stopped.is_set():
                return
            busy = f"Another process is measuring {name} in {folder}; wait for it or leave it to that."
            with locked(case_lock(folder, name), busy, SECONDS_OF_A_LOOK):
                if (record := finished(name)) is None:
                    began = time.monotonic()
                    outcome, value = run_apart(task, (cases[name], folder / name), None, gpu, stopped)
                    if outcome == "complete" and (refused := refusal_of(cases[name], value)) is not None:
                        outcome, value = "failed", refused
                    complete = outcome == "complete"
                    if outcome not in FINISHED:
                        stopped.wait(SECONDS_OF_A_SIGNAL)
                    if not complete and stopped.is_set():
                        return  # it did not fail, it was ended
                    record = {
                        "case": name,
                        "task": name_of_task,
                        "config": to_dict(cases[name]),
                        "outcome": outcome,
                        "reason": None if complete else value,
                        "seconds": round(time.monotonic() - began, 3),
                        "result": value if complete else None,
                        "environment": machine,
                    }
                    write_json(folder / f"{name}.json", record)
            records[name] = record
            progress.update(sum(map(bool, records.values())), f"{name} {record['outcome']}")

    busy = f"Another process is measuring in {folder}; wait for it or choose another folder."
    gpus, names = measuring_gpus(cases.values()), iter(missing)
    with contextlib.nullcontext() if shared else locked(folder / ".lock", busy), ThreadPoolExecutor(len(gpus)) as pool:
        try:
            for future in [pool.submit(measure_on, gpu, names) for gpu in gpus]:
                future.result()
        except BaseException:
            stopped.set()  # ends the cases that have begun
            raise
    progress.close()
    return records


def require_complete(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UserError` naming the first case that failed otherwise than by a lack of memory."""
    for name, record in records.items():
        require(record["outcome"] in FINISHED, f"Benchmark case {name} failed: {record['reason']}")


def task_name(task: Task) -> str:
    """`module:function`. Raises `UserError` unless that leads back to the task, as another process needs it to."""
    name = f"{task.__module__}:{task.__qualname__}"
    found = getattr(importlib.import_module(task.__module__), task.__qualname__, None)
    require(found is task, f"A task must be a function at the top of a module, not {name}.")
    return name


def measuring_gpus(cases: Iterable[WorkloadConfig]) -> list[str | None]:
    """GPUs to deal cases out to; only one place, which sees every device, if any case names another than "cuda".

    Cases on the CPU would else run side by side, and slow each other down; "cuda:1" would be hidden from its own case.
    """
    dealt = all(case.device in ("auto", "cuda") for case in cases)
    return [*visible_gpus()] or [None] if dealt else [None]


# Records on disk: files that jobs which know nothing of each other share


def renamed(record: Any) -> Any:
    """A record, or its part, with the names that keys have today."""
    if not isinstance(record, dict):
        return record
    parts = {key: renamed(record[key]) for key in ("config", "result") if key in record}
    return {OLD_KEYS.get(key, key): value for key, value in (record | parts).items()}


def read_record(path: Path) -> dict[str, Any] | None:
    """The record in `path`; None if there is none, or if it is damaged: such a case is measured again."""
    try:
        record = renamed(read_json(path))
    except UserError:
        return None
    keys = {"case", "task", "config", "outcome", "reason", "result", "environment"}
    whole = isinstance(record, dict) and keys <= set(record) and isinstance(record["environment"], dict)
    return record if whole and (record["outcome"] != "complete" or isinstance(record["result"], dict)) else None


def is_of(record: Mapping[str, Any], task: str, config: WorkloadConfig) -> bool:
    """Whether this is a record of this very measurement.

    A task may have had another name (`OLD_TASKS`); fields missing in the configuration have their defaults.
    """
    try:
        same_task = OLD_TASKS.get(record["task"], record["task"]) == task
        return same_task and from_dict(WorkloadConfig, record["config"]) == config
    except UserError:  # a field that no longer exists, or a value that it no longer takes
        return False


def case_lock(folder: Path, name: str) -> Path:
    """The file that the process which measures a case holds. It stays: with no record beside it, the case was ended."""
    return folder / f".{name}.lock"


def is_measured_now(folder: Path, name: str) -> bool:
    """Whether a process measures this case at this moment."""
    return is_locked(case_lock(folder, name))


# Processes


def run_apart(
    function: Callable[..., Any],
    arguments: tuple,
    timeout: float | None = None,
    gpu: str | None = None,
    stopped: threading.Event | None = None,
) -> tuple[str, Any]:
    """Calls `function` in a fresh process: ("complete", its value), or an outcome and the reason in words.

    The outcome is "out of memory" where a device's or the host's memory did not suffice, else "failed", also after
    `timeout` seconds and when `stopped` is set. `gpu`, named as in CUDA_VISIBLE_DEVICES, is the only one that the
    process sees; None: all. The process ends with this one, and when this call does.
    """
    # Forked from a process that has imported PyTorch and used nothing of it, where that works: a fork of this one
    # would inherit a CUDA context that it cannot use.
    context = multiprocessing.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, function, arguments, gpu), daemon=False)
    child.start()
    began = time.monotonic()
    try:
        sender.close()
        while not receiver.poll(0.2):
            if stopped is not None and stopped.is_set():
                return "failed", "It was stopped."
            if timeout is not None and time.monotonic() - began > timeout:
                return "failed", f"It was ended after {timeout:.0f} s without a result."
        answer = receiver.recv()
        child.join(timeout=5)  # it ends by itself
        return answer
    except EOFError:
        child.join()
        if (code := child.exitcode) == -signal.SIGKILL:  # nobody else sends it
            return "out of memory", KILLED
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return "failed", f"The process ended with {how} and said nothing."
    finally:  # also on Ctrl-C
        if child.is_alive():
            _end(child)
        child.join()
        receiver.close()


def _end(child: BaseProcess) -> None:
    """Ends a process at once; one that ends what it has started, as it does nsys, has a moment for that."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        family[0].terminate()
    for process in psutil.wait_procs(family, timeout=SECONDS_TO_END)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _report(sender: Connection, function: Callable[..., Any], arguments: tuple, gpu: str | None) -> None:
    if gpu is not None:  # in time: nothing has used CUDA here
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    begin_worker()
    try:
        answer = "complete", function(*arguments)
    except UserError as error:
        answer = "failed", str(error)
    except BaseException as error:
        if (reason := out_of_memory_reason(error)) is not None:
            answer = "out of memory", reason
        else:
            traceback.print_exc()
            answer = "failed", f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more: the runner was ended
        sender.send(answer)
    sender.close()


def examine(wanted: Iterable[tuple[str, str]]) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
    """The environment, and a sentence for each (device, precision) that cannot be had here."""
    refusals = {}
    for device, precision in wanted:
        try:
            require_precision(select_device(device)[0], precision)
        except UserError as error:
            refusals[device, precision] = str(error)
    return environment(), refusals
