"""Progress: a live bar in a terminal or in JupyterLab, plain timed lines when nobody watches."""

import os
import sys
import time
from html import escape
from typing import Any

from tqdm.auto import tqdm

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_REDRAWS = 0.5


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
        self.total, self.name, self.unit, self.start = total, name, unit, start
        self.began = self.last_line = time.monotonic()
        self.reported: int | None = None
        self.bar = self.picture = None
        if in_jupyter():
            self.picture, self.redrawn = show_live(self.html(start, "", 0.0)), self.began
        elif sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=start, desc=name, unit=unit)

    def update(self, done: int, note: str = "") -> None:
        """`done` units are finished; `note` says what is worth watching."""
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now, ended = time.monotonic(), done >= self.total and done != self.reported
        self.reported = done
        if self.picture is not None:
            if now - self.redrawn >= SECONDS_BETWEEN_REDRAWS or ended:
                self.redrawn = now
                self.picture.update({"text/html": self.html(done, note, now - self.began)}, raw=True)
        elif now - self.last_line >= SECONDS_BETWEEN_LINES or ended:
            self.last_line = now
            print(self.line(done, note, now - self.began), flush=True)

    def log(self, line: dict[str, Any]) -> None:
        """Shows step and losses of a metrics line."""
        valid = f", validation {line['valid_loss']:.3f}" if "valid_loss" in line else ""
        self.update(line["step"], f"loss {line['train_loss']:.3f}{valid}")

    def line(self, done: int, note: str, elapsed: float) -> str:
        """The plain line for `done` units after `elapsed` seconds."""
        rate = (done - self.start) / elapsed if elapsed > 0 else 0.0
        left = f", {(self.total - done) / rate:.0f} s left" if rate > 0 and done < self.total else ""
        pace = f", {rate:.3g} {self.unit}s/s{left}" if rate > 0 else ""
        text = f"{self.name}: {self.unit} {done}/{self.total}, {elapsed:.0f} s{pace}"
        return f"{text}, {note}" if note else text

    def html(self, done: int, note: str, elapsed: float) -> str:
        """The bar of a notebook, and the plain line beside it."""
        line = escape(self.line(done, note, elapsed))
        return f'<progress value="{done}" max="{self.total}" style="width: 14em"></progress> <code>{line}</code>'

    def close(self) -> None:
        """Ends the bar."""
        if self.bar is not None:
            self.bar.close()


def show_live(html: str) -> Any:
    """Shows HTML in the cell that runs; returns the handle by which it is replaced."""
    from IPython.display import display

    return display({"text/html": html}, raw=True, display_id=True)
