"""Progress: a live bar in a terminal or notebook, plain timed lines when nobody watches."""

import sys
import time

from tqdm.auto import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts up to `total`; `update(done, note)` shows rate, remaining time and a short note.

    With a terminal on standard error it draws a bar; otherwise it prints a line at most every ten seconds and at the
    end. `start` is where a resumed task begins, so that the rate counts only this process's work.
    """

    def __init__(self, total: int, name: str, unit: str = "step", start: int = 0):
        self.total, self.name, self.unit, self.start = total, name, unit, start
        self.began = self.last_line = time.monotonic()
        self.bar = tqdm(total=total, initial=start, desc=name, unit=unit) if sys.stderr.isatty() else None

    def update(self, done: int, note: str = "") -> None:
        """`done` units are finished; `note` says what is worth watching."""
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now - self.last_line >= SECONDS_BETWEEN_LINES or done >= self.total:
            self.last_line = now
            print(self.line(done, note, now - self.began), flush=True)

    def line(self, done: int, note: str, elapsed: float) -> str:
        """The plain line for `done` units after `elapsed` seconds."""
        rate = (done - self.start) / elapsed if elapsed > 0 else 0.0
        left = f", {(self.total - done) / rate:.0f} s left" if rate > 0 and done < self.total else ""
        text = f"{self.name}: {self.unit} {done}/{self.total}, {elapsed:.0f} s, {rate:.3g} {self.unit}s/s{left}"
        return f"{text}, {note}" if note else text

    def close(self) -> None:
        """Ends the bar."""
        if self.bar is not None:
            self.bar.close()
