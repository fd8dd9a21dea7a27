"""Runs benchmark cases: each in a process of its own, recorded on disk as soon as it ends, never measured twice."""

import contextlib
import importlib
import multiprocessing
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lmcore.config import from_dict, to_dict
from lmcore.device import out_of_memory_reason, require_precision, select_device
from lmcore.errors import FINISHED, UserError, require
from lmcore.files import locked, read_json, write_json
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.plausible import refusal_of
from lmcore.profiling.processes import end_with_children
from lmcore.progress import Progress
from lmcore.provenance import command_line, environment
from lmcore.stopping import begin_worker

Task = Callable[[WorkloadConfig, Path], dict[str, Any]]
"""Measures one benchmark case, may write files into the folder it is given, and returns what JSON can hold."""

MACHINE = ("device", "torch")
"""What must be the same of the environment for a record to stand."""

KILLED = "The system ended the process, as it does when the host's memory is used up (SIGKILL)."

PRELOADED = ["lmcore.profiling.runner", "lmcore.profiling.timing", "torch._dynamo"]
"""Modules that are imported once, before the processes of all cases are forked from there. They leave CUDA alone;
the last is what PyTorch imports when memory is recorded."""


def run_cases(task: Task, cases: Mapping[str, WorkloadConfig], folder: Path | str, title: str = "cases") -> dict:
    """Measures every benchmark case with `task`, one at a time, and returns the records by name, in order.

    Each case has a fresh process, so that a lack of memory is its outcome and the next one starts clean. A record
    {case, task, config, outcome, reason, seconds, result, environment} is written to folder/<name>.json as each case
    ends; the task's own files go to folder/<name>/. A measurement that arithmetic forbids has failed
    (`lmcore.profiling.plausible`). Cases that are complete or out of memory, with the same task, configuration, device
    and PyTorch, are not measured again.

    Raises `UserError`, before anything runs, on names that are no file names, on tasks that cannot be imported, where a
    case's device is not there or does not compute in its precision, and when another process measures in the folder.
    """
    folder, task_name = Path(folder), f"{task.__module__}:{task.__qualname__}"
    importable = getattr(importlib.import_module(task.__module__), task.__qualname__, None) is task
    require(importable, f"A task must be a function at the top of a module, not {task_name}.")
    for name in cases:
        require(re.fullmatch(r"\w[\w.+-]*", name) is not None, f"A case's name must be a file name, not {name!r}.")
    if not cases:
        return {}
    busy = f"Another process is measuring in {folder}; wait for it or choose another folder."
    if folder.is_dir() and not all((folder / f"{name}.json").exists() for name in cases):
        with locked(folder / ".lock", busy):  # what cannot be written is refused at once
            pass
    wanted = sorted({(case.device, case.precision) for case in cases.values()})
    outcome, machine = run_apart(examine, (wanted,))  # this process is not to hold a GPU
    require(outcome == "complete", str(machine))
    same = {"task": task_name} | {key: machine.get(key) for key in MACHINE}
    records = {name: finished_record(folder / f"{name}.json", case, same) for name, case in cases.items()}
    missing = [name for name, record in records.items() if record is None]
    if reused := len(cases) - len(missing):
        print(f"{title}: {reused} of {len(cases)} cases reused.", flush=True)
    if not missing:
        return records
    progress = Progress(len(cases), title, unit="case", start=reused)
    with locked(folder / ".lock", busy):
        for done, name in enumerate(missing, reused + 1):
            began = time.monotonic()
            outcome, value = run_apart(task, (cases[name], folder / name))
            if outcome == "complete" and (refused := refusal_of(cases[name], value)) is not None:
                outcome, value = "failed", refused
            records[name] = {
                "case": name,
                "task": task_name,
                "config": to_dict(cases[name]),
                "outcome": outcome,
                "reason": None if outcome == "complete" else value,
                "seconds": round(time.monotonic() - began, 3),
                "result": value if outcome == "complete" else None,
                "environment": machine | {"command": command_line()},
            }
            write_json(folder / f"{name}.json", records[name])
            progress.update(done, f"{name} {outcome}")
    progress.close()
    return records


def finished_record(path: Path, case: WorkloadConfig, same: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record in `path` if it is a finished one of this very case, task and machine, and nothing forbids it.

    A damaged one is none: such a case is measured again.
    """
    try:
        record = read_json(path)
        there = record["environment"] | {"task": record["task"]}
        same_case = from_dict(WorkloadConfig, record["config"]) == case
        stands = same_case and same.items() <= there.items() and record["outcome"] in FINISHED
        whole = isinstance(record["result"], dict) == (record["outcome"] == "complete")
        return record if stands and whole and refusal_of(case, record["result"]) is None else None
    except (UserError, KeyError, TypeError):
        return None


def require_complete(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UserError` naming the first case that failed otherwise than by a lack of memory."""
    for name, record in records.items():
        require(record["outcome"] in FINISHED, f"Benchmark case {name} failed: {record['reason']}")


def examine(wanted: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The environment. Raises `UserError` where a (device, precision) cannot be had here."""
    for device, precision in wanted:
        require_precision(select_device(device)[0], precision)
    return environment()


def run_apart(function: Callable[..., Any], arguments: tuple, timeout: float | None = None) -> tuple[str, Any]:
    """Calls `function` in a fresh process: ("complete", its value), or an outcome and the reason in words.

    The outcome is "out of memory" where a device's or the host's memory did not suffice, else "failed", also after
    `timeout` seconds. The process ends with this one, and when this call does.
    """
    # Forked from a process that has imported PyTorch and used nothing of it, where that works: a fork of this one
    # would inherit a CUDA context that it cannot use.
    context = multiprocessing.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, function, arguments), daemon=False)
    child.start()
    try:
        sender.close()
        if not receiver.poll(timeout):
            return "failed", f"It was ended after {timeout:.0f} s without a result."
        answer = receiver.recv()
        child.join(timeout=5)  # it ends by itself
        return answer
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGKILL:  # nobody else sends it
            return "out of memory", KILLED
        return "failed", f"The process ended with exit code {child.exitcode} and said nothing."
    finally:  # also on Ctrl-C
        if child.is_alive():
            end_with_children(child.pid)
        child.join()
        receiver.close()


def ending(error: BaseException) -> tuple[str, str]:
    """The outcome that an error means, "out of memory" or "failed", and the reason in words."""
    if isinstance(error, UserError):
        return "failed", str(error)
    if (reason := out_of_memory_reason(error)) is not None:
        return "out of memory", reason
    traceback.print_exception(error)
    return "failed", f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _report(sender: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    begin_worker()
    try:
        answer = "complete", function(*arguments)
    except BaseException as error:
        answer = ending(error)
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more: the runner was ended
        sender.send(answer)
    sender.close()
