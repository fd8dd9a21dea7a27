"""Stop signals of a batch system: training saves itself, then the notebook is ended; nothing is lost, nothing is left.

The signals are handled here, in the process that executes the notebooks, and never in a notebook.
"""

import contextlib
import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import psutil

from lmcore.stopping import StopEvent, listening
from lmcore.workbook.kernel import LAUNCHER

MARK = "LMCORE_WORKBOOK"
"""Variable that marks every process of a notebook, also those that outlive their parents."""

STOP_SECONDS = 100.0
"""How long training may take to save itself: `sbatch --signal=B:USR1@120` leaves a little more."""
TERM_SECONDS = 20.0
"""The same after SIGTERM, which batch systems follow up with SIGKILL in half a minute, and after Ctrl-C."""

LOOK_SECONDS = 0.2
SETTLE_SECONDS = 2.0
"""A notebook whose training was stopped ends by itself, as soon as it has seen that."""
INTERRUPT_SECONDS = 5.0


class Stopped(Exception):
    """A stop signal came before this cell."""


class StopSignals:
    """Hears SIGUSR1, SIGTERM and SIGINT (Ctrl-C), and then ends the notebook that is being executed.

    The first of them is acknowledged at once. A second SIGTERM or SIGINT kills the notebook's processes, training too,
    and ends this one.

    The signal is forwarded, as SIGUSR1, to the training processes that the notebook has started. When they have saved
    themselves and ended, or `seconds` are over, the notebook has a moment to end by itself; then its kernel is
    interrupted, and killed if it does not answer.
    """

    def __init__(self, seconds: float = STOP_SECONDS):
        soon = min(seconds, TERM_SECONDS)
        self.seconds = {signal.SIGUSR1: seconds, signal.SIGTERM: soon, signal.SIGINT: soon}
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.requested: signal.Signals | None = None
        """The signal that came, the first one."""
        self.left_behind: list[str] = []
        """In words, training processes that had not ended in time."""
        self._deadline = float("inf")
        self._asked: SimpleQueue[bool] = SimpleQueue()  # may be filled from a signal handler, as an Event may not
        self._told: set[psutil.Process] = set()

    @contextmanager
    def heard(self) -> Iterator["StopSignals"]:
        """Listens for as long as the block lasts; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        heard = StopEvent(self.seconds, exits=True, before_exit=self._kill)
        with listening(heard):
            before = {number: signal.signal(number, self._hear) for number in self.seconds}
            try:
                yield self
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _kill(self) -> None:
        for process in family(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _hear(self, number: int, _: object) -> None:
        self.requested = self.requested or signal.Signals(number)
        # a second signal may only shorten the time
        self._deadline = min(self._deadline, time.monotonic() + self.seconds[signal.Signals(number)])
        self._asked.put(True)

    def require_go_on(self) -> None:
        """Raises `Stopped` if a signal came."""
        if self.requested is not None:
            raise Stopped

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a notebook is executed, and will be ended if a signal comes or came before.

        After a signal, no process of the notebook is left but training that is still saving itself: see `left_behind`.
        """
        ended, asked = threading.Event(), SimpleQueue()
        self._asked = asked

        def wait() -> None:
            if asked.get():
                self._end_notebook(ended)

        thread = threading.Thread(target=wait, daemon=True)
        if self.requested is not None:
            asked.put(True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            asked.put(False)
            thread.join()
            if self.requested is not None:
                self._clear()

    def _end_notebook(self, ended: threading.Event) -> None:
        quiet_since = time.monotonic()
        while not ended.wait(LOOK_SECONDS):
            now = time.monotonic()
            if self._forward():
                quiet_since = now
            if now > self._deadline or now - quiet_since > SETTLE_SECONDS:
                break
        number = signal.SIGINT
        while not ended.is_set():
            for kernel in self._kernels():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(kernel.pid), number)  # the kernel and what it has not put into other sessions
            ended.wait(INTERRUPT_SECONDS)
            number = signal.SIGKILL

    def _forward(self) -> list[psutil.Process]:
        """The training processes of the notebook; those that have not had the signal are sent it."""
        training = [process for process in family(self.mark) if is_training(process)]
        for process in training:
            if process not in self._told:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR1)
                self._told.add(process)
        return training

    def _kernels(self) -> list[psutil.Process]:
        return [process for process in family(self.mark) if LAUNCHER in command_line(process)]

    def _clear(self) -> None:
        """Waits for training that still saves itself, ends all other processes of the notebook."""
        while self._forward() and time.monotonic() < self._deadline:
            time.sleep(LOOK_SECONDS)
        others = []
        for process in family(self.mark):
            if is_training(process):
                where = command_line(process)[-1:]
                self.left_behind.append(f"process {process.pid} ({' '.join(where)})")
                continue
            others.append(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(others, timeout=INTERRUPT_SECONDS)


def family(mark: str) -> list[psutil.Process]:
    """All living processes that were started under this mark, whoever their parents are by now."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # others' processes, and those that have just ended
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def command_line(process: psutil.Process) -> list[str]:
    """The words that started a process; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_training(process: psutil.Process) -> bool:
    """Whether it is `lmcore train` or a worker of a sweep, which save themselves on a signal."""
    words = command_line(process)
    return any(
        os.path.basename(program) == "lmcore" and command in ("train", "sweep")
        for program, command in itertools.pairwise(words)
    )
