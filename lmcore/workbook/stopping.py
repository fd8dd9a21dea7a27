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

import psutil

from lmcore.stopping import STOP_SIGNALS, StopEvent, stop_signals

LAUNCHER = "ipykernel_launcher"
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


class StopSignals:
    """Hears the stop signals and SIGINT (Ctrl-C), and then ends the notebook that is being executed.

    The first of them is acknowledged at once. A second one, but SIGUSR1, kills the notebook's processes, training too,
    and ends this one.

    The signal is forwarded, as SIGUSR1, to the training processes that the notebook has started. When they have saved
    themselves and ended, or `seconds` are over, the notebook has a moment to end by itself; then its kernel is
    interrupted, and killed if it does not answer.
    """

    def __init__(self, seconds: float = STOP_SECONDS):
        soon = min(seconds, TERM_SECONDS)
        self.seconds = dict.fromkeys((signal.SIGINT, *STOP_SIGNALS), soon) | {signal.SIGUSR1: seconds}
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.left_behind: list[str] = []
        """In words, training processes that had not ended in time."""
        self._event = StopEvent()
        self._told: set[psutil.Process] = set()

    @contextmanager
    def heard(self) -> Iterator["StopSignals"]:
        """Listens for as long as the block lasts; only the main thread can."""
        with stop_signals(signal.SIGINT, exits=True) as self._event:
            self._event.before_exit = self._kill
            yield self

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that came, the first one."""
        return next(map(signal.Signals, self._event.came), None)

    def _time_is_up(self) -> bool:  # a second signal may only shorten the time
        return any(time.monotonic() > when + self.seconds[number] for number, when in [*self._event.came.items()])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a notebook is executed, and will be ended if a signal comes or came before.

        After a signal, no process of the notebook is left but training that is still saving itself: see `left_behind`.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._end_notebook, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self.requested is not None:
                while self._forward() and not self._time_is_up():
                    time.sleep(LOOK_SECONDS)
                self.left_behind += [f"process {p.pid} ({' '.join(command_line(p)[-1:])})" for p in self._forward()]
                psutil.wait_procs(self._kill(training=False), timeout=INTERRUPT_SECONDS)

    def _end_notebook(self, ended: threading.Event) -> None:
        quiet_since = None
        while not ended.wait(LOOK_SECONDS):
            if self.requested is not None:
                if self._forward() or quiet_since is None:
                    quiet_since = time.monotonic()
                if self._time_is_up() or time.monotonic() - quiet_since > SETTLE_SECONDS:
                    break
        number = signal.SIGINT
        while not ended.is_set():
            for process in family(self.mark):
                if LAUNCHER in command_line(process):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(os.getpgid(process.pid), number)  # and what it has not put into other sessions
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

    def _kill(self, training: bool = True) -> list[psutil.Process]:
        """Kills the notebook's processes, or those that do not train, and returns them."""
        killed = [process for process in family(self.mark) if training or not is_training(process)]
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return killed


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
    return any(
        os.path.basename(program) == "lmcore" and command in ("train", "sweep")
        for program, command in itertools.pairwise(command_line(process))
    )
