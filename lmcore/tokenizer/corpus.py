"""Counts the pretokens of files of any size, with several processes and little memory."""

import codecs
import gzip
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

from lmcore.errors import UserError
from lmcore.tokenizer.pretokenize import count_pretokens, safe_pieces

READ_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 22
"""Text that one process counts at a time: large against the cost of sending it, small against memory."""

SMALL_CORPUS_BYTES = 8 << 20
"""Below this, starting processes costs more than it saves."""


def read_text(path: str | os.PathLike, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yields the text of a UTF-8 file, plain or `.gz`, in parts of at most 1 MiB, newlines as they are.

    `progress` is called with the number of further bytes read from disk. Raises `UserError` if the file cannot be
    read, is not UTF-8, or is damaged.
    """
    path, seen, decoder = Path(path), 0, codecs.getincrementaldecoder("utf-8")()
    try:
        with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as file:
            while data := file.read(READ_BYTES):
                if text := decoder.decode(data):
                    yield text
                if progress is not None:
                    progress(raw.tell() - seen)
                    seen = raw.tell()
            decoder.decode(b"", final=True)
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}); convert it to UTF-8 first.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); fetch or compress it again.") from error
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_files(
    paths: Sequence[str | os.PathLike],
    special_tokens: Sequence[str],
    num_workers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    piece_characters: int = PIECE_CHARACTERS,
) -> Counter[str]:
    """How often each pretoken occurs in the files; each file is a text of its own.

    num_workers: processes that count; None: all cores, or none besides this one for a small corpus. They are started
    the way Python does by default, so a script on macOS or Windows needs its `if __name__ == "__main__"`.
    progress: called with ("counting", bytes read from disk, bytes of all files).
    """
    total = sum(_file_size(path) for path in paths)
    if num_workers is None:
        num_workers = available_cores() if total >= SMALL_CORPUS_BYTES else 1
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("counting", done, total)

    pieces = (
        piece for path in paths for piece in safe_pieces(read_text(path, advance), special_tokens, piece_characters)
    )
    counts: Counter[str] = Counter()
    if num_workers == 1:
        for piece in pieces:
            counts.update(count_pretokens(piece, special_tokens))
        return counts
    try:
        with ProcessPoolExecutor(num_workers) as pool:
            for counted in _in_flight(pool, pieces, special_tokens, 2 * num_workers):
                counts.update(counted)
    except BrokenProcessPool as error:
        raise UserError(
            "A process that counted pretokens died or could not start; try again with num_workers=1."
        ) from error
    return counts


def _file_size(path: str | os.PathLike) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


def _in_flight(
    pool: ProcessPoolExecutor, pieces: Iterable[str], special_tokens: Sequence[str], limit: int
) -> Iterator[Counter[str]]:
    """Counts the pieces in the pool, with at most `limit` of them in memory."""
    waiting: deque[Future[Counter[str]]] = deque()
    try:
        for piece in pieces:
            waiting.append(pool.submit(count_pretokens, piece, special_tokens))
            if len(waiting) == limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
