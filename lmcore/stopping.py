"""Signals that stop a command in order: acknowledged at once, obeyed where nothing is lost, enforced by a second one.

`stop_signals` is for what saves itself, `stoppable` for a whole command, `begin_worker` for processes that work for
another one.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; what a scheduler sends to cancel or preempt; what a closed terminal sends; what a scheduler sends before the
time limit (`--signal`). One that is ignored stays so, as SIGHUP under nohup."""

SAME_SIGNAL = 0.5
"""Seconds in which a signal that comes again is the same one: launchers forward what the process group has, too."""


class Stopped(KeyboardInterrupt):
    """A stop signal came while nothing had begun that could be lost; `number` is the signal's."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.number = number


class StopEvent:
    """Set by the first stop signal; inside `raises` the signal also raises `Stopped` in the main thread.

    With `exits` a second signal ends the process, after a call of `before_exit` in the listening thread.
    """

    def __init__(self) -> None:
        self.exits = False
        self.before_exit: Callable[[], object] = lambda: None
        self.first: signal.Signals | None = None
        self._raising = self._raised = self._acknowledged = False
        self._enforced: float | None = None  # since when another signal than SIGUSR1 ends the process

    def is_set(self) -> bool:
        """Whether a stop signal has come; `first` is the one that came first."""
        return self.first is not None

    @contextmanager
    def raises(self) -> Iterator[None]:
        """Inside the block a stop signal ends it by `Stopped` at once, as does one that came before.

        A library that the signal breaks off may raise another exception instead, or none: the block ends by `Stopped`.
        """
        before, self._raising = self._raising, True
        try:
            if self.first is not None:  # looked at after `_raising` is set: a signal in between is not missed
                raise Stopped(self.first)
            yield
        except Exception:
            if not self._raised:
                raise
        finally:
            stopped, self._raising, self._raised = self._raised, before, False
        if stopped:
            raise Stopped(self.first)

    def handle(self, number: int, _: object = None) -> None:
        """The handler, run by the main thread between two instructions of Python."""
        if self.first is None:
            self.first = signal.Signals(number)
            if self._raising:  # once: what the exception ends may clean up
                self._raised = True
                raise Stopped(number)

    def hear(self, number: int) -> None:
        """What the listening thread does at once, whatever the main thread is in the middle of."""
        now, name = time.monotonic(), signal.Signals(number).name
        if number == signal.SIGHUP:
            _leave_terminal()
        if number != signal.SIGUSR1:
            self._enforced = self._enforced or now + SAME_SIGNAL
            if self.exits and now > self._enforced:
                try:
                    _say(f"{name} again: ended at once; what was saved stays.")
                    self.before_exit()
                finally:
                    os._exit(128 + number)
        if not self._acknowledged:
            self._acknowledged = True
            again = "; a second signal ends the process at once" if self.exits else ""
            _say(f"{name}: stopping where nothing is lost{again}.")


_shared: list[StopEvent] = []
"""The event of the outermost block, while there is one."""


@contextmanager
def stop_signals() -> Iterator[StopEvent]:
    """Turns the stop signals into an event for as long as the block lasts; the first is acknowledged on standard error.

    A block inside another one shares its event and obeys it itself, also inside `raises`. Only the main thread can
    install handlers; another one gets the event that is there, or one that is never set.
    """
    event = _shared[0] if _shared else StopEvent()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    with ExitStack() as stack:
        stack.callback(vars(event).update, _raising=event._raising)
        event._raising = False
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN or number == signal.SIGINT:  # one is ignored as nohup or job.sh asks for
                signal.signal(number, event.handle)
                stack.callback(signal.signal, number, before or signal.SIG_DFL)  # None: not Python's
        if not _shared:  # last, as its end acknowledges what has come while the handlers are still the event's
            stack.enter_context(_listening(event))
            _shared.append(event)
            stack.callback(_shared.clear)
        yield event


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, a stop signal ends the block by `Stopped`, and a second one (SIGINT, SIGTERM or SIGHUP) the process there
    and then, even within a long call of C, where Python runs no handler: every command."""
    with stop_signals() as stop, stop.raises():
        stop.exits = True
        yield


@contextmanager
def _listening(event: StopEvent) -> Iterator[None]:
    """A thread in which `event` hears its signals as long as the block lasts, whatever handlers they have.

    Python's C handler wakes it through a socket, which works while the main thread is in C code. Main thread only.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while received := reader.recv(16):
            for number in received:
                if signal.getsignal(number) == event.handle:
                    event.hear(number)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        writer.close()
        thread.join()
        reader.close()


def begin_worker() -> None:
    """What a process that works for another one calls first: any signal ends it at once, and so does the end of the
    other, however that was ended: nobody would read the result."""
    signal.set_wakeup_fd(-1)  # of a forked process: the other's thread does not hear this one's signals
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _leave_terminal() -> None:
    """Of a terminal that is gone, writing fails, which would end what is still to be saved: it goes nowhere instead."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _say(sentence: str) -> None:
    with suppress(OSError, ValueError):  # a full disk, a closed stream: the exit code says enough
        print(f"lmcore: {sentence}", file=sys.stderr, flush=True)
