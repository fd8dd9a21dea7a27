"""Counts the pretokens of files of any size, with several processes and little memory."""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from lmcore.errors import UserError
from lmcore.text import read_text
from lmcore.tokenizer.pretokenize import count_pretokens, safe_pieces

PIECE_CHARACTERS = 1 << 22
"""Text that one process counts at a time: large against the cost of sending it, small against memory."""

SMALL_CORPUS_BYTES = 8 << 20
"""Below this, starting processes costs more than it saves."""


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
        piece
        for path in paths
        for piece in safe_pieces(read_text(Path(path), advance), special_tokens, piece_characters)
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
