"""Runs a reader's function: with a time limit, and without the functions that would be the exercise itself."""

import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

import lmcore

LIBRARY = str(Path(lmcore.__file__).parent)
OTHERS = str(Path(torch.__file__).parents[1])
"""Where installed packages are."""
EXERCISES = str(Path(__file__).parent)
Place = tuple[str, int]
"""File and first line of a function."""
SWITCHES = ("setprofile", "settrace", "setprofile_all_threads", "settrace_all_threads")


class Refused(BaseException):
    """A function was called that an exercise is about, or the time was up; no `except Exception` swallows it."""


class Watch(TorchFunctionMode):
    """Sees the calls of a reader's code: Python's by `profile`, PyTorch's, whatever their names, as a mode of it."""

    def __init__(self, avoid: Collection[str], own: Collection[Place], given: Collection[Place]):
        super().__init__()
        self.avoid, self.own, self.given = avoid, own, given
        self.refused: Refused | None = None
        self.suspended = threading.local()

    def refuse(self, words: str) -> NoReturn:
        """Raises `Refused`, and remembers it: the code may go on all the same."""
        self.refused = self.refused or Refused(words)
        raise self.refused

    def called(self, name: str) -> None:
        """Refuses a library's function of a name to avoid, also as `_softmax` or `special_softmax`."""
        if name.partition(".")[0].strip("_").removeprefix("special_") in self.avoid:
            self.refuse(f"Your code calls {name} of a library, which is what you are to write.")

    def __torch_function__(self, function: Callable, types: Any, arguments: tuple = (), options: Any = None) -> Any:
        if getattr(self.suspended, "by", None) is None:
            self.called(getattr(function, "__name__", ""))
        return function(*arguments, **(options or {}))

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls; while a function runs that earlier exercises gave back, nothing is watched."""
        suspended, code = getattr(self.suspended, "by", None), frame.f_code
        if suspended is not None:
            self.suspended.by = None if event == "return" and frame is suspended else suspended
        elif event == "call":
            place = code.co_filename, code.co_firstlineno
            by_exercise = frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(EXERCISES)
            if place in self.given or (by_exercise and (place in self.own or code.co_filename.startswith(LIBRARY))):
                self.suspended.by = frame
            elif code.co_name in SWITCHES:
                self.refuse(f"Your code calls {code.co_name}, which would hide what it does.")
            elif place in self.own or code.co_filename.startswith(LIBRARY):
                self.refuse("Your code calls lmcore, which is the answer: write it without.")
            elif code.co_filename.startswith(OTHERS):
                owner = code.co_qualname.partition(".")[0]
                self.called(owner if code.co_name == "__init__" else code.co_name)
        elif event == "c_call" and frame.f_code.co_filename != __file__:
            name = getattr(argument, "__name__", "")
            if name in SWITCHES:
                self.refuse(f"Your code calls {name}, which would hide what it does.")
            self.called(name)


@contextmanager
def guarded(
    avoid: Collection[str], seconds: float, own: Collection[Place] = (), given: Collection[Place] = ()
) -> Iterator[None]:
    """Raises `Refused`, with a sentence, where the code inside calls lmcore, a function of a name in `avoid` that it
    has not written itself, or takes longer than `seconds` (in the main thread, where signals are known).

    `own` are answers outside of lmcore; `given` are those that earlier exercises gave back: they may be called.
    """

    watch = Watch(avoid, own, given)

    def too_long(*_: object) -> None:
        watch.refuse(f"Your code took longer than {seconds:g} s: does a loop not end?")

    timed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, too_long) if timed else None
    profiler = sys.getprofile()
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        with watch:
            threading.setprofile(watch.profile)
            sys.setprofile(watch.profile)
            yield
    finally:
        sys.setprofile(profiler)
        threading.setprofile(None)
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if watch.refused is not None:
            raise watch.refused
