"""Documents of text files as a stream, in constant memory."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lmcore.errors import require
from lmcore.text import END_OF_TEXT, read_text

PIECE_CHARS = 1 << 20


class Piece(NamedTuple):
    """A whole document, or a part of one that is too long to hold in memory."""

    text: str
    ends_document: bool


def split_documents(chunks: Iterable[str], piece_chars: int = PIECE_CHARS) -> Iterator[Piece]:
    """Documents between `<|endoftext|>`, without the white space around that token and without empty ones.

    A document of more than about `piece_chars` characters comes in several pieces, cut where the tokenizer's pattern
    cuts as well (`safe_cut`), so that the tokens of the pieces are those of the whole.
    """
    rest, inside = "", False  # inside: a piece of the document that `rest` belongs to has been given out
    for chunk in chunks:
        *ended, rest = (rest + chunk).split(END_OF_TEXT)
        for text in ended:
            text = text.rstrip() if inside else text.strip()
            if text:
                yield Piece(text, True)
            inside = False
        rest = rest if inside else rest.lstrip()
        while len(rest) > piece_chars and (cut := safe_cut(rest, piece_chars)):
            yield Piece(rest[:cut], False)
            rest, inside = rest[cut:], True
    if rest := rest.rstrip():
        yield Piece(rest, True)


def safe_cut(text: str, limit: int) -> int:
    """The last position up to `limit` where `text` can be cut without changing its tokens; 0 if there is none.

    GPT-2's pattern never joins across the space before a letter or digit: that space belongs to what follows, and any
    white space in front of it is a pretoken of its own, at the end of a text as well as inside one.
    """
    cut = text.rfind(" ", 1, limit)
    while cut > 0 and not (cut + 1 < len(text) and text[cut + 1].isalnum()):
        cut = text.rfind(" ", 1, cut)
    return max(cut, 0)


def read_documents(
    paths: Iterable[Path], on_read: Callable[[int], None] | None = None, piece_chars: int = PIECE_CHARS
) -> Iterator[Piece]:
    """The documents of several files, one file after the other; a file's end also ends its last document."""
    for path in paths:
        empty = True
        for piece in split_documents(read_text(path, on_read), piece_chars):
            empty = False
            yield piece
        require(not empty, f"{path} holds no text.")
