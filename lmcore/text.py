"""Reading text files of any size: plain, or a field of records; as they are or compressed."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from lmcore.errors import UserError, require
from lmcore.files import not_a_pipe, require_exists

END_OF_TEXT = "<|endoftext|>"
"""The special token between documents."""

ENDING = f"\n{END_OF_TEXT}\n"
"""What `read_text` puts after the text of each record."""

CHUNK_BYTES = 1 << 20

COMPRESSED = {".gz": "gzip", ".zst": "Zstandard"}


def plain_name(path: Path) -> str:
    """The file's name in lower case, without `.gz` or `.zst`."""
    name = path.name.lower()
    return name.removesuffix(next(filter(name.endswith, COMPRESSED), ""))


def optional(module: str, purpose: str, package: str, extra: str = "data") -> Any:
    """A module that lmcore does without. Raises `UserError` that names the package which brings it."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{purpose} {package}, of the extra {extra}: pip install {package}.") from None


def read_text(path: Path, field: str = "text", skipped: list[str] | None = None) -> Iterator[str]:
    """The UTF-8 text of a file in chunks; of a file of records (`.jsonl`, `.parquet`) the texts in their `field`, with
    `<|endoftext|>` after each. All but `.parquet` may be compressed (`.gz`, `.zst`).

    Records without a text are left out; `skipped` gets their numbers and what is wrong with them. Raises `UserError`
    that names the file, and for plain text that is not UTF-8 the offset of the first bad byte.
    """
    suffix = Path(plain_name(path)).suffix
    known = suffix not in (".json", ".csv", ".tsv")  # whose braces, keys and commas would be read as text
    require(known, f"{path} holds records, not plain text; write them as JSON lines (.jsonl).")
    require_exists(path)
    skipped = [] if skipped is None else skipped
    opener, damage = decompressor(path)
    try:
        with opener(not_a_pipe(path), "rb") as file:
            if suffix in RECORDS:
                yield from (text + ENDING for text in RECORDS[suffix](file, path, field, skipped))
            else:
                yield from decoded(file, path)
    except damage as error:
        what = f"{path} is not a whole {COMPRESSED[path.suffix]} file ({error}); download or compress it again."
        raise UserError(what) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def decompressor(path: Path) -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """What opens a file, and the errors of damaged content."""
    if path.suffix == ".gz":
        return gzip.open, (EOFError, gzip.BadGzipFile, zlib.error)
    if path.suffix == ".zst":
        try:
            zstd = import_module("compression.zstd")  # since Python 3.14
        except ImportError:
            zstd = optional("backports.zstd", f"{path} needs", "backports.zstd")
        return zstd.open, (EOFError, zstd.ZstdError)
    return open, ()


def decoded(file: BinaryIO, path: Path) -> Iterator[str]:
    """Plain text in chunks."""
    decoder, offset = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        while data := file.read(CHUNK_BYTES):
            offset += len(data)
            yield decoder.decode(data)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: the byte at offset {offset - len(error.object) + error.start:,}"
            f"{' of its decompressed content' if path.suffix in COMPRESSED else ''} cannot be decoded; convert it to "
            "UTF-8."
        ) from None


def json_texts(file: BinaryIO, path: Path, field: str, skipped: list[str]) -> Iterator[str]:
    """The texts in a field of JSON lines. Blank lines do not count."""
    for number, line in enumerate(file, 1):
        try:
            record = json.loads(line.decode("utf-8-sig")) if line.strip() else {field: ""}
            text = record[field]
            text.encode()  # JSON can escape half of a surrogate pair
        except UnicodeError:
            skipped.append(f"line {number} is not UTF-8")
        except (ValueError, RecursionError):
            skipped.append(f"line {number} is not JSON")
        except (TypeError, KeyError, AttributeError):
            fields = f", of {[*record][:5]}" if isinstance(record, dict) else ""
            skipped.append(f"line {number} has no text in the field {field!r}{fields}")
        else:
            yield text


def parquet_texts(file: BinaryIO, path: Path, field: str, skipped: list[str]) -> Iterator[str]:
    """The texts in a column of a Parquet file."""
    pyarrow = optional("pyarrow", f"{path} needs", "pyarrow")
    try:
        table = import_module("pyarrow.parquet").ParquetFile(file)
        known = table.schema_arrow.names
        require(field in known, f"{path} has no column {field!r}, but {', '.join(known)}; name one with --field.")
        batches = (batch.column(0).to_pylist() for batch in table.iter_batches(columns=[field]))
        for number, text in enumerate(chain.from_iterable(batches), 1):
            if isinstance(text, str):
                yield text
            else:
                skipped.append(f"row {number} has no text in the column {field!r}")
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file ({error}); download or write it again.") from error


RECORDS = {".jsonl": json_texts, ".ndjson": json_texts, ".parquet": parquet_texts}
"""Suffixes of files of records, each a document, and what reads their texts."""
