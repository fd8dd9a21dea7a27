"""From text to pretokens: the stretches of text across which byte-pair encoding never merges.

GPT-2's pattern (Radford et al. 2019) cuts text into words with their leading space, numbers, punctuation and white
space. Special tokens are cut out before it, and are never merged with anything.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import regex

from lmcore.errors import require

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"
"""GPT-2's pretoken pattern (openai/gpt-2, src/encoder.py). The possessive `++` matches the same as `+` there and saves
tiktoken's engine backtracking."""

pretokens = regex.compile(GPT2_PATTERN).findall
"""Splits a string into its pretokens: `pretokens("the cat's") == ["the", " cat", "'s"]`.

Which characters are letters or digits is decided by the Unicode tables of the `regex` package, so characters that
joined Unicode after the tables of another library were made may be classed differently there.
"""

# The pattern's \s is Unicode's white space; that of `re` also takes the control characters \x1c to \x1f.
_SPACE, _OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"

chunks = re.compile(rf"{_SPACE}*+{_OTHER}++|{_SPACE}++").findall
"""Splits a string before each run of white space: `chunks("the  cat's hat") == ["the", "  cat's", " hat"]`.

White space after another character always starts a pretoken, so the pretokens of a string are those of its chunks.
Finding chunks is several times as fast, and most of them recur: the pattern then sees each distinct chunk once.
"""

# Where the pretokens on both sides do not depend on each other: no alternative of the pattern goes on from a character
# that is not white space to one that is, from a letter to another kind of character, or from a digit to another kind.
_LAST_BOUNDARY = regex.compile(r"(?r)(?<=\S)\s|(?<=\p{L})[^\p{L}]|(?<=\p{N})[^\p{N}]")


def check_special_tokens(special_tokens: Iterable[str] | None) -> list[str]:
    """The special tokens without repetition. Raises `UserError` if one is empty or is no text."""
    require(not isinstance(special_tokens, str), f"special_tokens must be a list of strings, not {special_tokens!r}.")
    tokens = list(special_tokens or ())
    for token in tokens:
        sound = isinstance(token, str) and token != "" and token.encode(errors="ignore").decode() == token
        require(sound, f"A special token must be a non-empty string of whole characters, not {token!r}.")
    return list(dict.fromkeys(tokens))


def special_pattern(special_tokens: Sequence[str]) -> re.Pattern | None:
    """A pattern whose `split` puts text at even places and special tokens at odd ones; None without special tokens.

    Where special tokens overlap, the leftmost match wins, and at the same place the longest.
    """
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special_tokens else None


def count_pretokens(text: str, special_tokens: Sequence[str] = ()) -> Counter[str]:
    """How often each pretoken occurs in `text`, special tokens left out. Equal to `Counter(pretokens(text))`."""
    counts: Counter[str] = Counter()
    pattern = special_pattern(special_tokens)
    segments = pattern.split(text)[::2] if pattern else [text]
    for chunk, count in Counter(chunk for segment in segments for chunk in chunks(segment)).items():
        for pretoken in pretokens(chunk):
            counts[pretoken] += count
    return counts


def safe_pieces(parts: Iterable[str], special_tokens: Sequence[str], size: int) -> Iterator[str]:
    """Cuts a text that arrives in any `parts` anew into pieces of about `size` characters that can be treated alone.

    Pretokens and special tokens of the pieces, one after the other, are exactly those of the whole text. Pieces end
    after a special token where there is one (a document boundary), else at a place inside the document that no
    pretoken can straddle. Memory is of the order of `size`, the longest part or the longest pretoken.
    """
    pattern, longest = special_pattern(special_tokens), max(map(len, special_tokens), default=0)
    held: list[str] = []
    length, target = 0, size
    for part in parts:
        held.append(part)
        length += len(part)
        if length >= target:
            text = "".join(held)
            cut = _last_safe_cut(text, pattern, longest)
            if cut:
                yield text[:cut]
            held, length = [text[cut:]], len(text) - cut
            # without a cut wait for twice as much, so that a pretoken of any length is searched in linear time
            target = length + size if cut else 2 * length
    if length:
        yield "".join(held)


def _last_safe_cut(text: str, pattern: re.Pattern | None, longest: int) -> int:
    """The last place where `text`, the start of a longer text, can be cut whatever follows; 0 if there is none."""
    decided = len(text) - longest  # special tokens that start up to here are whole in `text`
    ends = [match.end() for match in pattern.finditer(text) if match.start() <= decided] if pattern else []
    boundary = _LAST_BOUNDARY.search(text, 0, max(decided, 0))
    return ends[-1] if ends else boundary.start() if boundary else 0
