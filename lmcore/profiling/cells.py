"""Sweeps of measurements: each cell in a process of its own, written down as soon as it is done, never done twice."""

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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from lmcore.config import to_dict
from lmcore.device import out_of_memory_reason, visible_gpus
from lmcore.errors import UserError, require
from lmcore.files import write_json
from lmcore.profiling.records import FINISHED, alone_in, finished_record, holding_cell, require_writable
from lmcore.profiling.workload import WorkloadConfig
from lmcore.progress import Progress
from lmcore.provenance import command_line, environment

Task = Callable[[WorkloadConfig, Path], dict[str, Any]]
"""Measures one cell, may write files into the folder it is given, and returns what JSON can hold."""

MACHINE = ("device", "torch")
"""What must be the same of the environment for an old record to stand."""

SECONDS_OF_A_SIGNAL = 0.5
"""A signal that ends a cell, as Ctrl-C does, reaches the process of the sweep in this time if it was meant for both."""

SECONDS_TO_END = 1.0
"""How long the process of a cell that is stopped has to end what it has started, before all of it is killed."""

PRELOADED = ["lmcore.profiling.timing", "torch._dynamo"]
"""Modules that are imported once, before the processes of all cells are forked from there. They leave CUDA alone;
the second is what PyTorch's optimizers import when the first one is made."""


def run_cells(
    task: Task,
    cells: Mapping[str, WorkloadConfig],
    folder: str | os.PathLike,
    title: str = "cells",
    timeout: float | None = None,
    foreign: bool = False,
    shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measures every cell with `task` and returns their records by name, in order.

    Cells are measured one at a time, or with several GPUs one at a time on each.

    Each cell has a fresh process, so that a lack of memory in one is its outcome and the next starts clean. A record
    {cell, task, config, outcome, reason, seconds, result, environment} is written to folder/<name>.json as each cell
    ends; the task's own files go to folder/<name>/. Cells that are complete or out of memory, with the same task,
    configuration, device and PyTorch, are not measured again; with `foreign`, those of another machine are not either:
    what a cluster measured is then read on a laptop. `timeout` in seconds ends a cell as failed.

    One process measures in a folder. With `shared`, as for the jobs of a cluster that each have a GPU of their own,
    others may measure other cells there at the same time. No cell is ever in two hands.

    Raises `UserError`, before anything runs, on names that are no file names and on tasks that cannot be imported;
    and when a folder or a cell is in other hands.
    """
    folder = Path(folder)
    for name in cells:
        require(re.fullmatch(r"\w[\w.+-]*", name) is not None, f"A cell's name must be a file name, not {name!r}.")
    named = task_name(task)
    machine = this_machine() if cells else {}
    required = {} if foreign else {key: machine.get(key) for key in MACHINE}
    records = {
        name: finished_record(folder / f"{name}.json", named, config, required) for name, config in cells.items()
    }
    reused = sum(record is not None for record in records.values())
    if reused:
        print(f"{title}: {reused} of {len(cells)} cells reused.", flush=True)
    progress = Progress(len(cells), title, unit="cell", start=reused)
    gpus: SimpleQueue[str | None] = SimpleQueue()  # those that nobody measures on
    for gpu in measuring_gpus(cells.values()):
        gpus.put(gpu)
    stopped, children = threading.Event(), set()

    def measured(name: str) -> dict[str, Any] | None:
        with holding_cell(folder, name):
            if stopped.is_set():
                return None
            record = finished_record(folder / f"{name}.json", named, cells[name], required)
            if record is not None:  # another process was faster
                return record
            gpu = gpus.get()
            try:
                record = measure_cell(task, name, cells[name], folder, timeout, gpu, children)
                record |= {"environment": machine}
            finally:
                gpus.put(gpu)
            if record["outcome"] not in FINISHED:
                stopped.wait(SECONDS_OF_A_SIGNAL)
            if record["outcome"] != "complete" and stopped.is_set():
                return None  # it did not fail, it was ended
            write_json(folder / f"{name}.json", record)
            return record

    def measure(name: str) -> None:
        record = measured(name)
        if record is None:
            return
        records[name] = record
        done = sum(record is not None for record in records.values())
        progress.update(done, f"{name} {record['outcome']}")

    missing = [name for name, record in records.items() if record is None]
    if missing:
        require_writable(folder)
    holding = alone_in(folder) if missing and not shared else contextlib.nullcontext()
    with holding, ThreadPoolExecutor(max_workers=gpus.qsize()) as pool:
        futures = [pool.submit(measure, name) for name in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):  # else the cells that have begun are waited for
                for child in [*children]:
                    end(child)
                time.sleep(0.01)
            raise
    progress.close()
    return {name: record for name, record in records.items() if record is not None}


def measuring_gpus(configs: Iterable[WorkloadConfig]) -> list[str | None]:
    """GPUs to deal cells out to; only one place, which sees every device, if any cell names another than "cuda".

    Cells on the CPU would else run side by side, and slow each other down; "cuda:1" would be hidden from its own cell.
    """
    dealt = all(config.device in ("auto", "cuda") for config in configs)
    return [*visible_gpus()] or [None] if dealt else [None]


def require_complete(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UserError` naming the first cell that failed otherwise than by a lack of memory."""
    for name, record in records.items():
        require(record["outcome"] in FINISHED, f"Cell {name} failed: {record['reason']}")


def measure_cell(
    task: Task,
    name: str,
    config: WorkloadConfig,
    folder: Path,
    timeout: float | None,
    gpu: str | None,
    children: set[BaseProcess],
) -> dict[str, Any]:
    """Runs `task` on one cell in a fresh process that sees only this GPU, and returns its record.

    As long as it lives, the process is in `children`.
    """
    began = time.monotonic()
    outcome, value = run_apart(perform, (task, config, folder / name), timeout, gpu, children)
    value = value if isinstance(value, dict) else {"reason": value}
    return {
        "cell": name,
        "task": task_name(task),
        "config": to_dict(config),
        "outcome": value.get("outcome", outcome),
        "reason": value.get("reason"),
        "seconds": round(time.monotonic() - began, 3),
        "result": value.get("result"),
    }


def perform(task: Task, config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """In the cell's process: the task's result, or that it did not fit into the memory."""
    try:
        result = task(config, folder)
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        return {"outcome": "out of memory", "reason": reason}
    return {"outcome": "complete", "result": result}


def run_apart(
    function: Callable[..., Any],
    arguments: tuple,
    timeout: float | None,
    gpu: str | None = None,
    children: set[BaseProcess] | None = None,
) -> tuple[str, Any]:
    """Calls `function` in a fresh process: ("complete", its value), or an outcome and the reason in words.

    `gpu`, named as in CUDA_VISIBLE_DEVICES, is the only one that the process sees; None: all. As long as it lives, the
    process is in `children`; it ends with this one, and when this call does.
    """
    context = processes()
    children = set() if children is None else children
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, function, arguments, gpu), daemon=False)
    child.start()
    children.add(child)
    try:
        sender.close()
        if not receiver.poll(timeout):
            return "failed", f"It was ended after {timeout:.0f} s without a result."
        return receiver.recv()
    except EOFError:
        child.join()
        return _ended(child.exitcode)
    except BaseException:  # Ctrl-C
        end(child)
        raise
    finally:
        if child.is_alive():
            child.join(timeout=5)
        if child.is_alive():
            child.terminate()
            child.join(timeout=5)
            child.kill()
        child.join()
        children.discard(child)
        receiver.close()


def end(child: BaseProcess) -> None:
    """Ends the process of a cell at once; one that ends what it has started, as it does nsys, has a moment for that."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    for how in (psutil.Process.terminate, psutil.Process.kill):
        for process in family[: 1 if how is psutil.Process.terminate else None]:
            with contextlib.suppress(psutil.Error):
                how(process)
        _, family = psutil.wait_procs(family, timeout=SECONDS_TO_END)


def processes() -> Any:
    """How fresh processes are made: forked from one that has imported PyTorch and used nothing of it, where that works.

    A fork of this process itself would inherit a CUDA context that it cannot use.
    """
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _report(sender: Connection, function: Callable[..., Any], arguments: tuple, gpu: str | None) -> None:
    if gpu is not None:  # in time: nothing has used CUDA here
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # they end a cell at once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = ("complete", function(*arguments))
    except UserError as error:
        answer = ("failed", str(error))
    except BaseException as error:
        traceback.print_exc()
        words = (str(error).strip() or "no message").splitlines()[0]
        answer = ("failed", f"{type(error).__name__}: {words}")
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more: the sweep was ended
        sender.send(answer)
    sender.close()


def _end_with_parent() -> None:
    """Ends this process when the one that measures is gone, however it was ended: nobody would read the result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _ended(code: int | None) -> tuple[str, str]:
    """Outcome of a process that ended without an answer."""
    if code == -signal.SIGKILL:  # nobody else sends it
        return "out of memory", "The system ended the process, as it does when the host's memory is used up (SIGKILL)."
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return "failed", f"The process ended with {how} and said nothing."


def this_machine() -> dict[str, Any]:
    """Provenance of every cell: found out in a process of its own, as this one is not to hold a GPU."""
    outcome, found = run_apart(environment, (), timeout=None)
    require(outcome == "complete", f"The machine cannot be examined: {found}")
    return found | {"command": command_line()}


def task_name(task: Task) -> str:
    """`module:function`. Raises `UserError` unless that leads back to the task, as another process needs it to."""
    name = f"{task.__module__}:{task.__qualname__}"
    found = getattr(importlib.import_module(task.__module__), task.__qualname__, None)
    require(found is task, f"A task must be a function at the top of a module, not {name}.")
    return name
