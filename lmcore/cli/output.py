"""Text that commands take and print: names and texts from files of others do not command the terminal."""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from lmcore.errors import UserError

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys: control characters, and those that turn the direction of writing."""


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with control characters, but those of `kept`, as escapes: ``\\x1b`` for the one of escape sequences."""
    return CONTROL.sub(lambda found: found[0] if found[0] in kept else ascii(found[0])[1:-1], text)


def utf8_text(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces, such as a command's arguments or the lines of standard input, if all of them are text.

    Python reads bytes that are not UTF-8 as lone surrogates there, or fails. Raises `UserError` for both.
    """
    try:
        for piece in pieces:
            piece.encode()
            yield piece
    except UnicodeError:
        raise UserError("The text is not UTF-8; convert it first, for example with iconv.") from None


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
