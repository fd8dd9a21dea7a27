"""Reading text files of any size, plain or gzipped."""

import codecs
import gzip
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from lmcore.errors import UserError
from lmcore.files import not_a_pipe

END_OF_TEXT = "<|endoftext|>"
"""The special token between documents."""

CHUNK_BYTES = 1 << 20

TABLES = {
    ".jsonl": "read_json(path, lines=True)",
    ".ndjson": "read_json(path, lines=True)",
    ".json": "read_json(path)",
    ".csv": "read_csv(path)",
    ".tsv": "read_csv(path, sep='\\t')",
    ".parquet": "read_parquet(path)",
}
"""Suffixes of files that hold texts in records, and how pandas reads them."""

ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
"""What a terminal takes as colours and movements."""

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


def require_text(path: Path) -> None:
    """Raises `UserError` for a file with records, whose braces, keys and commas would be read as text."""
    name = re.sub(r"\.gz$", "", path.name, flags=re.IGNORECASE)
    if reader := TABLES.get(Path(name.lower()).suffix):
        program = f"import pandas, sys; path = sys.argv[1]; print(*pandas.{reader}['text'], sep='\\n{END_OF_TEXT}\\n')"
        target = Path(name).with_suffix(".txt")
        raise UserError(
            f"{path} holds records, not plain text. Write the texts in them (here those called text) to a text file "
            f'first:\npython -c "{program}" {shlex.quote(str(path))} > {shlex.quote(str(target))}'
        )


def read_text(path: Path) -> Iterator[str]:
    """The UTF-8 text of a plain or gzipped (`.gz`) file in chunks.

    Raises `UserError` that names the file, and for text that is not UTF-8 the offset of the first bad byte; for files
    with records see `require_text`.
    """
    require_text(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with open(not_a_pipe(path), "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            while True:
                data = file.read(CHUNK_BYTES)
                undecoded = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    where = offset - undecoded + error.start
                    raise UserError(
                        f"{path} is not UTF-8 text: the byte at offset {where:,}"
                        f"{' of its decompressed content' if path.suffix == '.gz' else ''} cannot be decoded; "
                        "convert the file to UTF-8."
                    ) from None
                if offset == 0:
                    text = text.removeprefix("\ufeff")
                offset += len(data)
                if text:
                    yield text
                if not data:
                    return
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); download or compress it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
