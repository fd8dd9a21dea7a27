"""Executes one notebook by papermill, and checks, cell by cell, that it really ran."""

import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from lmcore.errors import UserError
from lmcore.files import atomic_write, temporary_folder
from lmcore.stopping import StopEvent
from workbook.notebook import code_cells, execution_fault, read_notebook
from workbook.record import NotebookRecord, write_record
from workbook.seal import seal

STOP_SECONDS = 100.0
"""How long a kernel has to end: `sbatch --signal=B:USR1@120` leaves a little more."""

MARK = "LMCORE_FAMILY"
"""Environment variable that marks every process of a kernel, also those that outlive their parents."""


def execute(source: Path, record: NotebookRecord, out: Path, stop: StopEvent, stop_seconds: float) -> None:
    """Executes one notebook into out/notebooks with the record's parameters, and checks it.

    `record` says how it ended, and is on disk all the while. The executed notebook is saved before each cell, so that
    it also keeps a run that failed, was stopped or was killed. A signal in `stop` ends it: `ended_by`.
    """
    from lmcore.provenance import COMMAND, command_line, environment, shown

    began, target = time.monotonic(), (out / "notebooks" / source.name).resolve()
    record.state, record.environment = "running", environment()
    write_record(out, record)
    target.unlink(missing_ok=True)  # what an earlier run has left says nothing of this one
    if (pictures := source.parents[1] / "figures" / "pictures").is_dir():  # where its Markdown finds them
        shutil.copytree(pictures, out / "figures" / "pictures", dirs_exist_ok=True)
    print(f"{record.name}: running", flush=True)
    parameters = record.parameters or {}
    values = " ".join(shown(f"{name}={value}") for name, value in parameters.items())
    command = f"{command_line()} (notebook {source.stem}: {values or 'defaults'})"
    with ended_by(stop, stop_seconds) as variables:
        problem = _run(source, target, parameters, variables | {COMMAND: command}, stop)
    record.seconds = round(time.monotonic() - began, 1)
    record.state = "done"
    executed = read_notebook(target)
    fault = execution_fault(executed)
    if problem and (fault is None or fault[1] == "the cell was not run"):
        # the kernel is gone: no cell has an error, and the one that ran has a number as if it had ended
        begun = (n for n, cell in code_cells(executed) if cell.metadata.get("papermill", {}).get("start_time"))
        fault = max(begun, default=0), problem
    if fault:
        record.cell = fault[0] or None
        stopped, failed = stop.first, fault[1].rstrip(".")
        record.state, record.error = ("stopped", stopped.name) if stopped else ("failed", failed)
    seal(out, record.name)
    write_record(out, record)
    print(f"{record.name}: {record.state} after {record.seconds:.0f} s", flush=True)


def _run(
    source: Path, target: Path, parameters: Mapping[str, Any], variables: Mapping[str, str], stop: StopEvent
) -> str | None:
    """papermill's execution of a notebook; returns why it ended early, if papermill says so."""
    import papermill
    from papermill.exceptions import PapermillException
    from papermill.iorw import LocalHandler, papermill_io

    class WholeOrNot(LocalHandler):
        """Writes the executed notebook so that it is never half there: this process may be killed."""

        def write(self, text: str, path: str) -> None:
            with atomic_write(path, "w") as file:
                file.write(text)

    def begin_cell(**_: object) -> None:
        if stop.is_set():
            raise InterruptedError

    papermill_io.register(str(target), WholeOrNot())
    try:
        with _kernel(variables) as manager:
            papermill.execute_notebook(
                source,
                target,
                dict(parameters),
                kernel_name="python3",
                kernel_manager_class=manager,
                language="python",
                cwd=source.parent,
                coalesce_streams=True,  # what a cell prints reaches the writeup in one piece
                stdout_file=sys.stdout,  # how far training is, for the terminal and the log of a job
                on_cell_execute=begin_cell,
            )
    except Exception as error:
        ended = stop.is_set() or isinstance(error, PapermillException | RuntimeError)  # RuntimeError: the kernel died
        if isinstance(error, UserError) or not ended:  # UserError: the disk is full
            raise
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


@contextmanager
def _kernel(variables: Mapping[str, str]) -> Iterator[type]:
    """Makes the notebook's kernel this very interpreter, whatever kernels are installed, with more variables."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    with temporary_folder("lmcore-kernel-") as folder:
        environment = {
            **variables,
            "IPYTHONDIR": str(folder),  # no profile of the user's, whose history a network's file system may lock
            "JUPYTER_RUNTIME_DIR": str(folder),
            # a cluster's MPLBACKEND=Agg would make every figure vanish from the notebook
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        spec = KernelSpec(argv=command, display_name="Python 3", language="python", env=environment)
        members: dict[str, Any] = {"kernel_spec": spec}
        if len(sockets := str(folder / "k")) < 90:  # systems take about 100 characters
            # ports may be taken between choosing and binding them, by the kernel of a job beside this one
            members |= {"_transport_default": lambda _: "ipc", "_ip_default": lambda _: sockets}
        yield type("Kernel", (AsyncKernelManager,), members)


@contextmanager
def ended_by(stop: StopEvent, seconds: float) -> Iterator[dict[str, str]]:
    """Gives the block variables for the environment of a kernel that it starts and ends; no process of it is left.

    A stop signal interrupts the kernel as Jupyter's button does, which ends what the kernel runs in order; what has not
    ended after `seconds` is killed, and after a second signal at once.
    """
    mark, ended = secrets.token_hex(8), threading.Event()

    def interrupt() -> None:
        while not stop.is_set():
            if ended.wait(0.2):
                return
        if not ended.wait(0.5):  # a cell that has just been sent is running by now
            for process in signal_family(mark, 0):  # no signal yet
                if process.ppid() == os.getpid():
                    os.killpg(process.pid, signal.SIGINT)
            if not ended.wait(seconds):
                signal_family(mark, signal.SIGKILL)

    stop.before_exit = lambda: signal_family(mark, signal.SIGKILL)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield {MARK: mark}
    finally:
        ended.set()
        thread.join()
        if stop.is_set():  # the kernel may have been ended before what it runs, which saves itself
            psutil.wait_procs(signal_family(mark, signal.SIGUSR1), timeout=seconds)
        psutil.wait_procs(signal_family(mark, signal.SIGKILL), timeout=seconds)


def signal_family(mark: str, number: int) -> list[psutil.Process]:
    """Sends a signal to all living processes with this mark in their environment, whoever their parents are by now."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # others' processes, and those that have just ended
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(number)
                members.append(process)
    return members
