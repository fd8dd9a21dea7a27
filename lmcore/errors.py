"""Errors that the user can correct: one clear sentence, no traceback."""

import errno
from typing import Any

EXIT_FAILURE = 1  # a command's work failed: a notebook, a cell, a measurement
EXIT_USER_ERROR = 2  # the command refuses its input
EXIT_DIVERGED = 3  # training stopped at a loss or gradient that is not finite
EXIT_OUT_OF_MEMORY = 4  # model or batch do not fit into the device's memory
EXIT_INTERRUPTED = 75  # stopped by a signal (SIGINT, SIGTERM, SIGUSR1), saved, ready to be resumed

EXIT_CODES = {
    "complete": 0,
    "diverged": EXIT_DIVERGED,
    "out of memory": EXIT_OUT_OF_MEMORY,
    "interrupted": EXIT_INTERRUPTED,
}
"""Exit code of `lmcore train` for each state in which a run can end."""

FINISHED = ("complete", "diverged", "out of memory")
"""States of a run or measurement that has its result and is not taken up again."""

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk, quota or file that is full."""


class UserError(ValueError):
    """A mistake in input, configuration or environment.

    The message is one sentence that names the file, field or value and says what to do. `lmcore.cli` prints it alone
    and exits with `EXIT_USER_ERROR`.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the sentence, without the calls that led to it."""
        return [f"UserError: {self}"]


class OutOfMemory(Exception):
    """One rank of a training run lacks memory, at `step`: the run ends so on all."""

    def __init__(self, reason: str, step: int):
        super().__init__(reason)
        self.step = step


def require(condition: bool, sentence: str) -> None:
    """Raises `UserError(sentence)` unless `condition` holds."""
    if not condition:
        raise UserError(sentence)


def require_positive(name: str, value: Any) -> None:
    """Raises `UserError` unless `value` is a whole number above 0."""
    require(type(value) is int and value > 0, f"{name} must be a positive whole number, not {value!r}.")


def require_seed(value: Any) -> None:
    """Raises `UserError` unless `value` is a seed that PyTorch takes, with room for one more for each prompt."""
    fits = type(value) is int and 0 <= value < 2**63
    require(fits, f"seed must be a whole number from 0 to 2**63 - 1, not {value!r}.")


def require_path(name: str, value: str) -> None:
    """Raises `UserError` if the text that is to name a file or folder is empty: as a path it is the current folder."""
    require(bool(str(value).strip()), f"{name} is empty: it must name a file or folder.")


def why_not_written(error: BaseException) -> str:
    """What the system said to a writer that failed, also where a library put its own words in front of it."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
