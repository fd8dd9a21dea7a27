"""Trains byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019; CSE599-O A1 section 2)."""

import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from lmcore.errors import require
from lmcore.tokenizer.corpus import count_files
from lmcore.tokenizer.pretokenize import check_special_tokens

Progress = Callable[[str, int, int], None]
Pair = tuple[int, int]


def train_bpe(
    input_path: str | os.PathLike | Sequence[str | os.PathLike],
    vocab_size: int,
    special_tokens: Sequence[str],
    *,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Trains a tokenizer on one or several UTF-8 files, plain or `.gz`.

    vocab_size: ids in all: 256 bytes, merged tokens and special tokens. A text with too few pairs ends sooner.
    special_tokens: strings at which text is cut and that are never merged.
    num_workers: processes that count pretokens; None: as many as help.
    progress: called with ("counting", bytes read, bytes in all) and then ("merging", merges made, merges wanted).

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
    require(
        num_workers is None or (isinstance(num_workers, int) and num_workers > 0),
        f"num_workers must be a positive whole number or None, not {num_workers!r}.",
    )
    paths = [input_path] if isinstance(input_path, str | os.PathLike) else list(input_path)
    counts = count_files(paths, special_tokens, num_workers, progress)
    require(bool(counts), f"{', '.join(map(str, paths)) or 'The list of input files'} holds no text to train on.")
    tokens, merges = merge_pretokens(counts, vocab_size - smallest, progress)
    vocab = dict(enumerate(tokens + [token.encode() for token in special_tokens]))
    return vocab, merges


def merge_pretokens(
    counts: Counter[str], num_merges: int, progress: Progress | None = None
) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Makes up to `num_merges` merges in pretokens with the given counts; returns the tokens by id, and the merges.

    The counts of all pairs are kept up to date, and for each pair the pretokens that hold it, so that a merge touches
    only those. No pair can become more frequent than the pair whose merge made it, so counts in the heap are upper
    bounds, and an outdated one is put right when it comes up.
    """
    words = [list(pretoken.encode()) for pretoken in counts]
    word_counts = list(counts.values())
    pair_counts, places = _count_pairs(words, word_counts)
    tokens = [bytes([byte]) for byte in range(256)]
    descending = [_descending_key(token) for token in tokens]
    heap = [(-count, descending[a], descending[b], (a, b)) for (a, b), count in pair_counts.items()]
    heapq.heapify(heap)
    merges: list[tuple[bytes, bytes]] = []
    while heap and len(merges) < num_merges:
        negative_count, key_a, key_b, pair = heapq.heappop(heap)
        count = pair_counts[pair]
        if count != -negative_count:
            if count:
                heapq.heappush(heap, (-count, key_a, key_b, pair))
            continue
        left, right = tokens[pair[0]], tokens[pair[1]]
        merges.append((left, right))
        new = len(tokens)
        tokens.append(left + right)
        descending.append(_descending_key(left + right))
        for a, b in _merge_pair(pair, new, words, word_counts, pair_counts, places):
            if pair_counts[a, b]:
                heapq.heappush(heap, (-pair_counts[a, b], descending[a], descending[b], (a, b)))
        if progress is not None:
            progress("merging", len(merges), num_merges)
    return tokens, merges


def _count_pairs(words: list[list[int]], word_counts: list[int]) -> tuple[dict[Pair, int], dict[Pair, list[int]]]:
    """How often each pair of adjacent tokens occurs, and in which words."""
    pair_counts: dict[Pair, int] = defaultdict(int)
    places: dict[Pair, list[int]] = defaultdict(list)
    for index, (word, count) in enumerate(zip(words, word_counts, strict=True)):
        for pair in pairwise(word):
            pair_counts[pair] += count
            if not places[pair] or places[pair][-1] != index:
                places[pair].append(index)
    return pair_counts, places


def _merge_pair(
    pair: Pair,
    new: int,
    words: list[list[int]],
    word_counts: list[int],
    pair_counts: dict[Pair, int],
    places: dict[Pair, list[int]],
) -> set[Pair]:
    """Replaces `pair` by the token `new`, left to right, in every word that holds it; returns the pairs that arose."""
    a, b = pair
    arisen = set()
    for index in places.pop(pair):
        word, count = words[index], word_counts[index]
        at = -1
        # words that lost the pair to an earlier merge are still in its list; there the loop finds nothing
        while (at := _find(word, a, at + 1)) >= 0:
            if at + 1 == len(word) or word[at + 1] != b:
                continue
            word[at : at + 2] = (new,)
            neighbours = []
            if at:
                pair_counts[word[at - 1], a] -= count
                neighbours.append((word[at - 1], new))
            if at + 1 < len(word):
                pair_counts[b, word[at + 1]] -= count
                neighbours.append((new, word[at + 1]))
            for neighbour in neighbours:
                pair_counts[neighbour] += count
                if not places[neighbour] or places[neighbour][-1] != index:
                    places[neighbour].append(index)
                arisen.add(neighbour)
    del pair_counts[pair]
    return arisen


def _find(word: list[int], token: int, start: int) -> int:
    """Index of `token` in `word` from `start` on, or -1."""
    try:
        return word.index(token, start)
    except ValueError:
        return -1


def _descending_key(token: bytes) -> str:
    """A key that sorts in the opposite order of the byte strings, for a heap whose smallest entry comes first.

    Each byte is complemented, and an end mark above all bytes makes a string sort after its own extensions.
    """
    return bytes(255 - byte for byte in token).decode("latin-1") + "\u0100"
