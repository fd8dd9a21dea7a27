"""Progress: a bar of tqdm in a terminal or in JupyterLab, plain timed lines when nobody watches."""

import os
import sys
import time
from typing import Any

from tqdm.auto import tqdm

SECONDS_BETWEEN_LINES = 10.0


def in_jupyter() -> bool:
    """Whether this process is the kernel of a notebook that is open in Jupyter; not under papermill or nbval.

    Jupyter's server sets JPY_SESSION_NAME for kernels that it starts; programs that execute notebooks do not.
    """
    ipython = sys.modules.get("IPython")
    return "JPY_SESSION_NAME" in os.environ and hasattr(ipython and ipython.get_ipython(), "kernel")


class Progress:
    """Counts up to `total`; `update(done, note)` shows rate, remaining time and a short note.

    With a terminal on standard error, or in JupyterLab, it draws a bar; otherwise it prints a line at most every ten
    seconds and at the end. `start` is where a resumed task begins, so that the rate counts only this process's work.
    """

    def __init__(self, total: int, name: str, unit: str = "step", start: int = 0):
        self.meter: dict[str, Any] = {"total": total, "prefix": name, "unit": unit, "initial": start}
        self.reported = -1
        self.began = self.last_line = time.monotonic()
        watched = in_jupyter() or sys.stderr.isatty()
        self.bar = tqdm(total=total, desc=name, unit=unit, initial=start, miniters=1) if watched else None

    def move(self, done: int) -> None:
        """`done` units are finished: a bar moves, lines wait for an `update`."""
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def update(self, done: int, note: str = "") -> None:
        """`done` units are finished; `note` says what is worth watching."""
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.move(done)
            return
        now, ended = time.monotonic(), done >= self.meter["total"] and done != self.reported
        self.reported = done
        if now - self.last_line >= SECONDS_BETWEEN_LINES or ended:
            self.last_line = now
            print(tqdm.format_meter(done, elapsed=now - self.began, ncols=0, postfix=note, **self.meter), flush=True)

    def log(self, line: dict[str, Any]) -> None:
        """Shows step and losses of a metrics line."""
        valid = f", validation {line['valid_loss']:.3f}" if "valid_loss" in line else ""
        self.update(line["step"], f"loss {line['train_loss']:.3f}{valid}")

    def close(self) -> None:
        """Ends the bar."""
        if self.bar is not None:
            self.bar.close()
