"""Pretokens: the fast count and the cutting of streams against GPT-2's published pattern on the whole text."""

import itertools
import random
from collections import Counter

import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_reference import PUBLISHED_PATTERN, split

from lmcore.tokenizer.pretokenize import chunks, count_pretokens, pretokens, safe_pieces

SPECIALS = ["<|endoftext|>", "<|endoftext|><|endoftext|>", "<pad >", "<", "ab", "abc d"]
# white space of every kind, contractions, special tokens and their parts, characters that Python alone calls space
PIECES = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u2028", "\x1c", "\x85", "\0", "\U0010ffff"]
PIECES += ["'s", "'", "'ll", "re", "a", "b", "c d", "Zürich", "語", "e\u0301", "42", "½", "!?", "—", "🙂", "<|", "|>"]
texts = st.lists(st.sampled_from(PIECES + SPECIALS) | st.characters(exclude_categories=("Cs",)), max_size=40)
specials = st.lists(st.sampled_from(SPECIALS), unique=True)


def expected_pretokens(text: str, special_tokens: list[str]) -> list[str]:
    segments = split(text, special_tokens)[::2]
    return [word for segment in segments for word in regex.findall(PUBLISHED_PATTERN, segment)]


@given(texts.map("".join))
def test_pattern_matches_like_the_published_one(text):
    assert pretokens(text) == regex.findall(PUBLISHED_PATTERN, text)


@given(texts.map("".join), specials)
def test_fast_count_equals_the_pattern_on_the_whole_text(text, special_tokens):
    assert count_pretokens(text, special_tokens) == Counter(expected_pretokens(text, special_tokens))


@given(texts, specials, st.integers(1, 12))
def test_pieces_of_a_stream_hold_the_pretokens_of_the_whole(parts, special_tokens, size):
    pieces = list(safe_pieces(parts, special_tokens, size))
    text = "".join(parts)
    assert "".join(pieces) == text
    found = [word for piece in pieces for word in expected_pretokens(piece, special_tokens)]
    assert found == expected_pretokens(text, special_tokens)
    found_specials = [token for piece in pieces for token in split(piece, special_tokens)[1::2]]
    assert found_specials == split(text, special_tokens)[1::2]


def test_a_stream_is_cut_near_the_size_and_after_special_tokens():
    text = "".join(random.Random(0).choices(["word ", "3.5 ", "\n", "don't "], k=20_000))
    pieces = list(safe_pieces([text[at : at + 7] for at in range(0, len(text), 7)], [], 1000))
    assert max(map(len, pieces)) < 1100
    documents = ["one two three<|endoftext|>", "four five six<|endoftext|>", "seven"]
    assert next(safe_pieces(documents, ["<|endoftext|>"], 10)) == documents[0]
    assert list(safe_pieces(["a" * 1000] * 300, [], 100)) == ["a" * 300_000]  # a pretoken is not cut


def test_chunks_have_the_white_space_of_the_pattern():
    text = "".join(f"a{chr(code)}b" for code in range(0x110000))
    places = [0, *(found.start() for found in regex.finditer(r"\s", text)), len(text)]
    assert chunks(text) == [text[start:end] for start, end in itertools.pairwise(places)]
