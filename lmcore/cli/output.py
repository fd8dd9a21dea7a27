"""What commands print: names and texts from files of others do not command the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from lmcore.text import printable


class SafeStream:
    """A stream to which control characters go as escapes."""

    def __init__(self, stream: TextIO, bars: bool = False):
        self.exact, self.bars = stream, bars
        """The stream itself; whether a carriage return that begins a text stays, as a bar of progress needs it."""

    def write(self, text: str) -> int:
        """Writes the text as it may be printed."""
        back = self.bars and text.startswith("\r")
        self.exact.write("\r" + printable(text[1:]) if back else printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)


@contextlib.contextmanager
def printing_safely() -> Iterator[None]:
    """Inside, standard output and error are `SafeStream`s."""
    out, error = SafeStream(sys.stdout), SafeStream(sys.stderr, bars=sys.stderr.isatty())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):  # type: ignore[type-var]
        yield


def text_output() -> TextIO:
    """Where a text itself is printed, such as decoded tokens: exact, but on a terminal."""
    return sys.stdout if sys.stdout.isatty() else getattr(sys.stdout, "exact", sys.stdout)
