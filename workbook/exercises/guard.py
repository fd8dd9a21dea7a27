"""Runs a reader's function: with a time limit, and without the functions that would be the exercise itself."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lmcore

LIBRARY = str(Path(lmcore.__file__).parent)


class Refused(Exception):
    """A function was called that an exercise is about, or the time was up."""


@contextmanager
def guarded(avoid: tuple[str, ...], seconds: float) -> Iterator[None]:
    """Raises `Refused`, with a sentence, where the code inside calls lmcore, a function of a name in `avoid` that it
    has not written itself, or takes longer than `seconds` (in the main thread, where signals are known)."""

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            raise Refused("Your code calls lmcore, which is the answer: write it without.")
        if event == "call" and frame.f_code.co_name in avoid and "site-packages" in frame.f_code.co_filename:
            raise Refused(f"Your code calls {frame.f_code.co_name} of a library, which is what you are to write.")
        if event == "c_call" and getattr(argument, "__name__", "") in avoid:
            raise Refused(f"Your code calls {argument.__name__} of a library, which is what you are to write.")

    def too_long(*_: object) -> None:
        raise Refused(f"Your code took longer than {seconds:g} s: does a loop not end?")

    timed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, too_long) if timed else None
    profiler = sys.getprofile()
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        sys.setprofile(watch)
        yield
    finally:
        sys.setprofile(profiler)
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def run(function: Callable[[], Any], avoid: tuple[str, ...], seconds: float) -> Any:
    """What `function` returns under `guarded`."""
    with guarded(avoid, seconds):
        return function()
