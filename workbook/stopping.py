"""A stop signal ends the notebook that is being executed: training saves itself first, and no process is left.

The signals are handled in the process that executes the notebooks (`lmcore.stopping`), never in a notebook.
"""

import itertools
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from lmcore.stopping import StopEvent

LAUNCHER = "ipykernel_launcher"
MARK = "LMCORE_WORKBOOK"
"""Environment variable that marks every process of a notebook, also those that outlive their parents."""

STOP_SECONDS = 100.0
"""How long training may take to save itself: `sbatch --signal=B:USR1@120` leaves a little more."""
SETTLE_SECONDS = 2.0
"""A cell whose training was stopped ends by itself, as soon as it has seen that."""
INTERRUPT_SECONDS = 5.0
LOOK_SECONDS = 0.2


@contextmanager
def ended_by(stop: StopEvent, seconds: float = STOP_SECONDS) -> Iterator[str]:
    """Gives the block a mark for the environment of its kernel; a stop signal ends all processes that carry it.

    Training processes get SIGUSR1 and have `seconds` to save themselves and end. Then the kernel is interrupted, and
    after `INTERRUPT_SECONDS` what is left is killed. A second signal kills all of them at once.
    """
    mark, ended = secrets.token_hex(8), threading.Event()
    stop.before_exit = lambda: kill(family(mark))
    thread = threading.Thread(target=_end_notebook, args=(mark, stop, seconds, ended), daemon=True)
    thread.start()
    try:
        yield mark
    finally:
        ended.set()
        thread.join()
        psutil.wait_procs(kill(family(mark)), timeout=INTERRUPT_SECONDS)


def _end_notebook(mark: str, stop: StopEvent, seconds: float, ended: threading.Event) -> None:
    while not stop.is_set():
        if ended.wait(LOOK_SECONDS):
            return
    training = [process for process in family(mark) if is_training(process)]
    for process in training:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGUSR1)
    psutil.wait_procs(training, timeout=seconds)
    if ended.wait(SETTLE_SECONDS):
        return
    for process in family(mark):
        if LAUNCHER in command_line(process):
            with suppress(ProcessLookupError):
                os.killpg(os.getpgid(process.pid), signal.SIGINT)
    if not ended.wait(INTERRUPT_SECONDS):
        kill(family(mark))


def family(mark: str) -> list[psutil.Process]:
    """All living processes with this mark in their environment, whoever their parents are by now."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # others' processes, and those that have just ended
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def kill(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Kills processes, and returns them."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return processes


def command_line(process: psutil.Process) -> list[str]:
    """The words that started a process; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_training(process: psutil.Process) -> bool:
    """Whether it is `lmcore train` or a worker of a sweep, which save themselves on a signal."""
    return any(
        (os.path.basename(program), command) in (("lmcore", "train"), ("workbook", "sweep"))
        for program, command in itertools.pairwise(command_line(process))
    )
