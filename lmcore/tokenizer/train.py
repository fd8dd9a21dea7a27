"""Trains byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019; CSE599-O A1 section 2).

First the pretokens of the files are counted, then the most frequent pair of tokens in them is merged, again and again.
"""

import os
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from pathlib import Path

from lmcore.errors import UserError, require
from lmcore.stopping import begin_worker
from lmcore.text import read_text
from lmcore.tokenizer.pretokenize import check_special_tokens, count_pretokens, safe_pieces

PIECE_CHARACTERS = 1 << 22
"""Text that one process counts at a time: large against the cost of sending it, small against memory."""

SMALL_CORPUS_BYTES = 8 << 20
"""Below this, starting processes costs more than it saves."""

Merges = list[tuple[bytes, bytes]]
Pair = tuple[int, int]


def train_bpe(
    input_path: str | os.PathLike | Sequence[str | os.PathLike],
    vocab_size: int,
    special_tokens: Sequence[str],
    *,
    num_workers: int | None = None,
) -> tuple[dict[int, bytes], Merges]:
    """Trains a tokenizer on one or several UTF-8 files (`lmcore.text`: compressed ones, too).

    vocab_size: ids in all: 256 bytes, merged tokens and special tokens. A text with too few pairs ends sooner, which a
    line on stderr says.
    special_tokens: strings at which text is cut and that are never merged.
    num_workers: processes that count pretokens; None: as many as help.

    Each step merges the most frequent pair of adjacent tokens; among equals the lexicographically greatest pair of
    byte strings. Returns `vocab`, id -> bytes, and `merges` in the order they were made. Ids are laid out as in
    GPT-2: bytes 0 to 255, merged tokens in their order, special tokens last; so an id is also a tiktoken rank.

    Raises `UserError` if vocab_size has no room, if a special token is a single byte, or if a file is missing,
    damaged, not UTF-8, or without text.
    """
    special_tokens = check_special_tokens(special_tokens)
    for token in special_tokens:
        require(
            len(token.encode()) > 1,
            f"The special token {token!r} is a single byte, which the vocabulary holds anyway; choose a longer one.",
        )
    smallest = 256 + len(special_tokens)
    require(
        isinstance(vocab_size, int) and vocab_size >= smallest,
        f"vocab_size must be a whole number of at least {smallest} (256 bytes and the special tokens), "
        f"not {vocab_size!r}.",
    )
    paths = [input_path] if isinstance(input_path, str | os.PathLike) else list(input_path)
    counts = count_files(paths, special_tokens, num_workers)
    require(bool(counts), f"{', '.join(map(str, paths)) or 'The list of input files'} holds no text to train on.")
    tokens, merges = merge_pretokens(counts, vocab_size - smallest)
    vocab = dict(enumerate(tokens + [token.encode() for token in special_tokens]))
    if len(vocab) < vocab_size:
        said = f"The text has no more pairs to merge: {len(vocab):,} tokens, fewer than the {vocab_size:,} asked for."
        print(said, file=sys.stderr)
    return vocab, merges


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_files(
    paths: Sequence[str | os.PathLike], special_tokens: Sequence[str], num_workers: int | None = None
) -> Counter[str]:
    """How often each pretoken occurs in the files; each file is a text of its own.

    num_workers: processes that count; None: all cores, or none besides this one for a small corpus. They are started
    the way Python does by default, so a script on macOS or Windows needs its `if __name__ == "__main__"`.
    """
    try:
        total = sum(os.path.getsize(path) for path in paths)
    except OSError as error:
        raise UserError(f"Cannot read {error.filename}: {error.strerror}.") from error
    if num_workers is None:
        num_workers = available_cores() if total >= SMALL_CORPUS_BYTES else 1
    texts = (read_text(Path(path)) for path in paths)
    pieces = (piece for text in texts for piece in safe_pieces(text, special_tokens, PIECE_CHARACTERS))
    counts: Counter[str] = Counter()
    if num_workers == 1:
        for piece in pieces:
            counts.update(count_pretokens(piece, special_tokens))
        return counts
    pool = ProcessPoolExecutor(num_workers, initializer=begin_worker)
    try:
        submitted = (pool.submit(count_pretokens, piece, special_tokens) for piece in pieces)
        waiting = deque(islice(submitted, 2 * num_workers))  # so many pieces are in memory at a time
        while waiting:
            counts.update(waiting.popleft().result())
            waiting.extend(islice(submitted, 1))
    except BrokenProcessPool as error:
        raise UserError("A process that counted pretokens died or could not start; use num_workers=1.") from error
    finally:
        pool.shutdown(cancel_futures=True)
    return counts


class _Descending(bytes):
    """Bytes that sort from the greatest to the least, for a heap whose smallest entry comes first."""

    __lt__ = bytes.__gt__


def merge_pretokens(counts: Counter[str], num_merges: int) -> tuple[list[bytes], Merges]:
    """Makes up to `num_merges` merges in pretokens with the given counts; returns the tokens by id, and the merges.

    The counts of all pairs are kept up to date, and for each pair the pretokens that hold it, so that a merge touches
    only those. No pair can become more frequent than the pair whose merge made it, so counts in the heap are upper
    bounds, and an outdated one is put right when it comes up.
    """
    words, word_counts = [list(pretoken.encode()) for pretoken in counts], list(counts.values())
    pair_counts: dict[Pair, int] = defaultdict(int)
    places: dict[Pair, list[int]] = defaultdict(list)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += word_counts[index]
            places[pair].append(index)
    tokens = [_Descending([byte]) for byte in range(256)]
    merges: Merges = []

    def entry(pair: Pair) -> tuple[int, bytes, bytes, Pair]:
        return -pair_counts[pair], tokens[pair[0]], tokens[pair[1]], pair

    heap = [entry(pair) for pair in pair_counts]
    heapify(heap)
    while heap and len(merges) < num_merges:
        negative_count, left, right, pair = heappop(heap)
        if pair_counts[pair] != -negative_count:
            if pair_counts[pair]:
                heappush(heap, entry(pair))
            continue
        merges.append((bytes(left), bytes(right)))
        new = len(tokens)
        tokens.append(_Descending(left + right))
        arisen: set[Pair] = set()
        for index in dict.fromkeys(places.pop(pair)):
            before, count = words[index], word_counts[index]
            words[index] = word = merge_pair(before, pair, new)
            if len(word) == len(before):  # another merge has taken the pair apart
                continue
            for old in pairwise(before):
                pair_counts[old] -= count
            for now in pairwise(word):
                pair_counts[now] += count
                if new in now:
                    places[now].append(index)
                    arisen.add(now)
        del pair_counts[pair]
        for now in arisen:
            heappush(heap, entry(now))
    return list(map(bytes, tokens)), merges


def merge_pair(word: list[int], pair: Pair, new: int) -> list[int]:
    """`word` with the token `new` for each `pair`, from the left on."""
    left, right = pair
    merged: list[int] = []
    for token in word:
        if token == right and merged and merged[-1] == left:
            merged[-1] = new
        else:
            merged.append(token)
    return merged
