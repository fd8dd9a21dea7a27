"""Signals that stop a run in an orderly way: noticed at once, obeyed where nothing is lost."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What a scheduler sends: SIGUSR1 before the time limit (`--signal`), SIGTERM when it cancels or preempts."""

_holders: list[threading.Event] = []


@contextmanager
def stop_signals(*more: signal.Signals) -> Iterator[threading.Event]:
    """Turns the stop signals, and `more`, into an event for as long as the block lasts.

    A block inside another one shares its event, so that a signal between two runs is not forgotten. Only the main
    thread can install handlers; in another thread the event is the one that is there, or one that is never set.
    """
    event = _holders[-1] if _holders else threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, lambda *_: event.set()) for number in (*STOP_SIGNALS, *more)}
    _holders.append(event)
    try:
        yield event
    finally:
        _holders.pop()
        for number, handler in before.items():
            signal.signal(number, handler)
