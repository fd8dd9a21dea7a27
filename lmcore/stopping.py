"""Signals that stop a run in order: acknowledged at once, obeyed where nothing is lost, enforced by a second one."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What a scheduler sends: SIGUSR1 before the time limit (`--signal`), SIGTERM when it cancels or preempts."""

SAME_SIGNAL = 0.5
"""Seconds in which a signal that comes again is the same one: launchers forward what the process group has, too."""


class Stopped(KeyboardInterrupt):
    """A stop signal came while nothing had begun that could be lost."""


class StopEvent:
    """Set by the first stop signal; inside `raises` the signal also raises `Stopped` in the main thread."""

    def __init__(self) -> None:
        self._set = self._raising = self._acknowledged = False
        self._first: tuple[float, int] | None = None
        self.numbers: set[int] = set()
        self.exits = False

    def is_set(self) -> bool:
        """Whether a stop signal has come."""
        return self._set

    @contextmanager
    def raises(self) -> Iterator[None]:
        """Inside the block a stop signal ends it by `Stopped` at once, as does one that came before."""
        if self._set:
            raise Stopped
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def handle(self, *_: object) -> None:
        """The handler, run by the main thread between two instructions of Python."""
        self._set = True
        if self._raising:
            self._raising = False  # once: what the exception ends may clean up
            raise Stopped

    def hear(self, number: int) -> None:
        """What the listening thread does at once, whatever the main thread is in the middle of."""
        now, name = time.monotonic(), signal.Signals(number).name
        if self._first is None or (self._first[1] == signal.SIGUSR1 and number != signal.SIGUSR1):
            self._first = now, number
        elif self.exits and number != signal.SIGUSR1 and now - self._first[0] > SAME_SIGNAL:
            _say(f"{name} again: ended at once; what was saved stays.")
            os._exit(128 + number)
        if not self._acknowledged:
            self._acknowledged = True
            again = "; a second signal ends the process at once" if self.exits else ""
            _say(f"{name}: stopping where nothing is lost{again}.")


_holders: list[StopEvent] = []


@contextmanager
def stop_signals(*more: signal.Signals, exits: bool = False) -> Iterator[StopEvent]:
    """Turns the stop signals, and `more`, into an event for as long as the block lasts.

    The first signal is acknowledged on standard error. With `exits`, as in a process of one's own, a second one
    (another SIGINT or SIGTERM) ends the process there and then, even within a long call of C, where Python runs no
    handler. A block inside another one shares its event, so that a signal between two runs is not forgotten. Only the
    main thread can install handlers; in another thread the event is the one that is there, or one that is never set.
    """
    outermost = not _holders
    event = StopEvent() if outermost else _holders[-1]
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, event.handle) for number in (*STOP_SIGNALS, *more)}
    event.numbers |= before.keys()
    event.exits |= exits
    _holders.append(event)
    try:
        with _listener(event) if outermost else nullcontext():
            yield event
    finally:
        _holders.pop()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listener(event: StopEvent) -> Iterator[None]:
    """A thread that Python's C handler wakes through a socket, which works while the main thread is in C code."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while received := reader.recv(16):
            for number in received:
                if number in event.numbers:
                    event.hear(number)

    thread = threading.Thread(target=listen, name="lmcore-signals", daemon=True)
    thread.start()
    woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        writer.close()
        thread.join()
        reader.close()


def _say(sentence: str) -> None:
    try:
        print(f"lmcore: {sentence}", file=sys.stderr, flush=True)
    except OSError:  # a full disk: the exit code says enough
        return
