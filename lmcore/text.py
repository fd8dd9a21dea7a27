"""Reading text files of any size, plain or gzipped."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from lmcore.errors import UserError
from lmcore.files import not_a_pipe

END_OF_TEXT = "<|endoftext|>"
"""The special token between documents."""

CHUNK_BYTES = 1 << 20

RECORDS = {
    ".jsonl": "json({}, lines=True)", ".ndjson": "json({}, lines=True)", ".json": "json({})", ".csv": "csv({})",
    ".tsv": "table({})", ".parquet": "parquet({})",
}  # fmt: skip
"""Suffixes of files that hold texts in records, whose braces, keys and commas would be read as text, and what reads
them: one of the functions `read_` of pandas."""


def plain_name(path: Path) -> str:
    """The file's name in lower case, without `.gz`."""
    return path.name.lower().removesuffix(".gz")


def require_text(path: Path) -> None:
    """Raises `UserError` for a file with records, which says how to make a text of them."""
    plain = Path(plain_name(path))
    if plain.suffix in RECORDS:
        texts = f"pandas.read_{RECORDS[plain.suffix].format(repr(str(path)))}['text']"
        command = rf"""python -c "import pandas; print(*{texts}, sep='\n{END_OF_TEXT}\n')" > {plain.stem}.txt"""
        raise UserError(f"{path} holds records, not plain text; write out one field of them, such as text: {command}")


def read_text(path: Path) -> Iterator[str]:
    """The UTF-8 text of a plain or gzipped (`.gz`) file in chunks.

    Raises `UserError` that names the file, and for text that is not UTF-8 the offset of the first bad byte; for files
    with records see `require_text`.
    """
    require_text(path)
    decoder, offset = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        with open(not_a_pipe(path), "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            while data := file.read(CHUNK_BYTES):
                offset += len(data)
                yield decoder.decode(data)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: the byte at offset {offset - len(error.object) + error.start:,}"
            f"{' of its decompressed content' if path.suffix == '.gz' else ''} cannot be decoded; convert it to UTF-8."
        ) from None
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); download or compress it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
