"""Training against a brute-force trainer, in one process and several, from plain and gzipped files."""

import gzip
import random

import pytest
import tokenizer_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.errors import UserError
from lmcore.tokenizer import END_OF_TEXT, train_bpe
from lmcore.tokenizer.pretokenize import count_pretokens
from lmcore.tokenizer.train import merge_pretokens


def random_text(seed: int, length: int) -> str:
    """Words with much repetition within and between them, documents, some Unicode."""
    draw = random.Random(seed)
    alphabets = draw.choices(["aab", "abcdeéß語"], k=60)
    words = ["".join(draw.choices(alphabet, k=draw.randint(1, 9))) for alphabet in alphabets]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    separators = draw.choices([" ", "  ", "\n", ". ", END_OF_TEXT, "'s "], [20, 1, 1, 2, 1, 1], k=length)
    return "".join(a + b for a, b in zip(draw.choices(words, weights, k=length), separators, strict=True))


@pytest.fixture
def write(tmp_path):
    """Writes a text to a file and gives its path."""

    def write(text: str | bytes, name: str = "corpus.txt"):
        path = tmp_path / name
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    return write


def test_equals_the_brute_force_trainer(write):
    text, special_tokens = random_text(0, 1000), [END_OF_TEXT, END_OF_TEXT * 2, "aab"]
    vocab, merges = train_bpe(write(text), 256 + 3 + 100, special_tokens)
    assert merges == reference.train([text], 100, special_tokens)
    merged = [left + right for left, right in merges]
    assert len(merged) == 100
    specials = [token.encode() for token in special_tokens]
    assert vocab == dict(enumerate([*(bytes([byte]) for byte in range(256)), *merged, *specials]))


@given(st.lists(st.text("ab", min_size=1, max_size=12) | st.text(max_size=6), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_merges_equal_brute_force_until_nothing_is_left(words):
    """Few letters and equal counts: ties, overlapping pairs such as aaa, and the end of all pairs."""
    text = " ".join(words)
    tokens, merges = merge_pretokens(count_pretokens(text), 500)
    assert merges == reference.train([text], 500, [])
    assert tokens[256:] == [left + right for left, right in merges]


def test_gzip_several_files_and_processes_train_the_same(write, monkeypatch):
    text = random_text(2, 10_000)
    expected = train_bpe(write(text), 350, [END_OF_TEXT])
    half = text.index(END_OF_TEXT, len(text) // 2)
    halves = [write(text[:half], "1.txt"), write(text[half:], "2.txt.gz")]
    assert train_bpe(halves, 350, [END_OF_TEXT]) == expected
    monkeypatch.setattr("lmcore.tokenizer.train.PIECE_CHARACTERS", 5000)
    assert train_bpe(halves, 350, [END_OF_TEXT], num_workers=2) == expected


def test_what_cannot_be_trained_is_one_sentence(write, tmp_path):
    text = write("some text")
    for paths, vocab_size, special_tokens, sentence in (
        (text, 256, [END_OF_TEXT], "at least 257"),
        (text, 300.0, [], "whole number"),
        (text, 300, ["x"], "single byte"),
        (text, 300, "<|endoftext|>", "must be a list"),
        (tmp_path, 300, [], "directory"),
        (write("<|endoftext|><|endoftext|>", "special.txt"), 300, [END_OF_TEXT], r"special\.txt holds no text"),
        (tmp_path / "absent.txt", 300, [], r"absent\.txt"),
    ):
        with pytest.raises(UserError, match=sentence):
            train_bpe(paths, vocab_size, special_tokens)


def test_a_text_with_too_few_pairs_is_said(write, capsys):
    vocab, _ = train_bpe(write("one one one"), 100_000, [END_OF_TEXT])
    said = f"The text has no more pairs to merge: {len(vocab)} tokens, fewer than the 100,000 asked for.\n"
    assert capsys.readouterr() == ("", said)
