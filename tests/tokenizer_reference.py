"""Byte-pair encoding in the fewest lines, slow and plainly right: the first step of the ladder that the tests climb."""

import re
from collections import Counter
from itertools import pairwise

import regex

from lmcore.tokenizer import END_OF_TEXT, Tokenizer

BYTES = Tokenizer({i: bytes([i]) for i in range(256)} | {256: END_OF_TEXT.encode()}, [], [END_OF_TEXT])
"""One token per byte, and <|endoftext|>: the smallest tokenizer, which breaks characters in two."""

PUBLISHED_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern as published with the model (openai/gpt-2, src/encoder.py)."""

Merges = list[tuple[bytes, bytes]]


def split(text: str, special_tokens: list[str]) -> list[str]:
    """Text and special tokens in turn, beginning and ending with text."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special_tokens else [text]


def words_of(text: str) -> list[list[bytes]]:
    """The pretokens of a text without special tokens, in single bytes."""
    return [[bytes([byte]) for byte in word.encode()] for word in regex.findall(PUBLISHED_PATTERN, text)]


def apply(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    """`word` with `left` and `right` merged wherever they meet, from the left on."""
    merged, at = [], 0
    while at < len(word):
        step = 2 if word[at : at + 2] == [left, right] else 1
        merged.append(b"".join(word[at : at + step]))
        at += step
    return merged


def train(texts: list[str], num_merges: int, special_tokens: list[str]) -> Merges:
    """Counts every pair in every word anew for each merge."""
    segments = [segment for text in texts for segment in split(text, special_tokens)[::2]]
    words = [word for segment in segments for word in words_of(segment)]
    merges: Merges = []
    while len(merges) < num_merges:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        words = [apply(word, *merges[-1]) for word in words]
    return merges


def encode(text: str, merges: Merges, special_tokens: list[str]) -> list[bytes]:
    """Applies all merges, one after the other, to every word."""
    tokens = []
    for place, part in enumerate(split(text, special_tokens)):
        for word in words_of(part) if place % 2 == 0 else [[part.encode()]]:
            for merge in merges:
                word = apply(word, *merge)
            tokens += word
    return tokens
