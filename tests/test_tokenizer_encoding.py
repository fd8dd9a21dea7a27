"""Encoding and decoding: against the naive reference, in streams of any cut, with special tokens and broken bytes."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizer_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.errors import UserError
from lmcore.tokenizer import END_OF_TEXT, Tokenizer
from lmcore.tokenizer.bpe import CACHED_CHUNKS
from lmcore.tokenizer.pretokenize import count_pretokens
from lmcore.tokenizer.train import merge_pretokens

SPECIALS = [END_OF_TEXT, END_OF_TEXT * 2, "<pad >", "aa b"]
CORPUS = Path(__file__).read_text(encoding="utf-8") + "aaaa aaab café 語語語 " * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens, merges = merge_pretokens(count_pretokens(CORPUS), 400)
    return Tokenizer(dict(enumerate(tokens)), merges, SPECIALS)


texts = st.lists(
    st.sampled_from([*SPECIALS, *CORPUS.split()[:200], " ", "\n", "  ", "<|", "a", "é", "語", "'s"])
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    max_size=30,
)


@given(texts.map("".join))
def test_encode_equals_the_naive_encoder_and_decode_inverts_it(tokenizer, text):
    ids = tokenizer.encode(text)
    assert [tokenizer.vocab[token_id] for token_id in ids] == reference.encode(text, tokenizer.merges, SPECIALS)
    assert tokenizer.decode(ids) == text


@given(texts)
def test_encode_iterable_equals_encode_for_any_cut(tokenizer, parts):
    assert list(tokenizer.encode_iterable(parts)) == tokenizer.encode("".join(parts))


@given(texts.map("".join), st.integers(1, 9), st.integers(1, 40))
@settings(deadline=None)
def test_encode_iterable_equals_encode_for_small_windows(tokenizer, text, step, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmcore.tokenizer.bpe.PIECE_CHARACTERS", window)
        parts = [text[at : at + step] for at in range(0, len(text), step)]
        assert list(tokenizer.encode_iterable(parts)) == tokenizer.encode(text)


def test_encode_iterable_in_constant_memory(tokenizer):
    """A stream of words that are all new, more of them than are kept: memory stays where it was."""

    def lines(count: int):
        draw = random.Random(count)
        for _ in range(count):
            yield " ".join("".join(draw.choices("abcdefgh", k=10)) for _ in range(100)) + "\n"

    def peak_bytes(count: int) -> int:
        fresh = Tokenizer(tokenizer.vocab, tokenizer.merges, SPECIALS)
        tracemalloc.start()
        try:
            ids = sum(1 for _ in fresh.encode_iterable(lines(count)))
            assert ids > 100 * count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    enough = CACHED_CHUNKS // 100 + 20
    assert peak_bytes(3 * enough) < 1.1 * peak_bytes(enough) < 16 << 20


def test_overlapping_special_tokens_longest_first(tokenizer):
    one, two, pad = (tokenizer.encode(token) for token in SPECIALS[:3])
    assert [len(ids) for ids in (one, two, pad)] == [1, 1, 1]
    assert tokenizer.encode(END_OF_TEXT * 3) == two + one
    assert tokenizer.encode(END_OF_TEXT * 2 + "<pad >" + END_OF_TEXT) == two + pad + one
    assert one == [tokenizer.eot_id]
    reordered = Tokenizer(tokenizer.vocab, tokenizer.merges, SPECIALS[::-1])
    assert reordered.encode(END_OF_TEXT * 3) == two + one


def test_without_special_tokens_their_text_is_ordinary(tokenizer):
    plain = Tokenizer(tokenizer.vocab, tokenizer.merges)
    assert len(plain.encode(END_OF_TEXT)) > 1
    assert plain.decode(plain.encode(END_OF_TEXT)) == END_OF_TEXT


def test_special_tokens_get_the_next_ids():
    vocab = {byte: bytes([byte]) for byte in range(256)}
    tokenizer = Tokenizer(vocab, [], ["<b>", "<a>", "<b>"])
    assert tokenizer.encode("<a><b>") == [257, 256]
    assert tokenizer.vocab_size == 258
    assert len(vocab) == 256
    with pytest.raises(UserError, match=r"no token <\|endoftext\|>"):
        tokenizer.eot_id  # noqa: B018


def test_vocabulary_without_all_bytes():
    """The example of CS336 A1 section 2.6.1."""
    tokens = [b" ", b"a", b"c", b"e", b"h", b"t", b"th", b" c", b" a", b"the", b" at"]
    merges = [(b"t", b"h"), (b" ", b"c"), (b" ", b"a"), (b"th", b"e"), (b" a", b"t")]
    tokenizer = Tokenizer(dict(enumerate(tokens)), merges)
    assert tokenizer.encode("the cat ate") == [9, 7, 1, 5, 10, 3]
    with pytest.raises(UserError, match="lacks the byte"):
        tokenizer.encode("the dog")
    with pytest.raises(UserError, match="256"):
        tokenizer.to_tiktoken()


@given(st.binary(max_size=20))
def test_decode_of_broken_bytes(tokenizer, data):
    assert tokenizer.decode(list(data)) == data.decode("utf-8", errors="replace")
    assert tokenizer.decode_bytes(list(data)) == data


def test_decode_takes_arrays_and_tensors_and_refuses_foreign_ids(tokenizer):
    ids = tokenizer.encode("some text")
    assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == "some text"
    assert tokenizer.decode(torch.tensor(ids)) == "some text"
    assert tokenizer.decode([]) == ""
    for foreign in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"^{foreign} is not a token id"):
            tokenizer.decode([*ids, foreign])


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.encode("\ud83d\ude42") == tokenizer.encode("🙂")


def test_a_very_long_pretoken_ends(tokenizer):
    ids = tokenizer.encode("a" * 200_000)
    assert tokenizer.decode(ids) == "a" * 200_000
    assert len(ids) < 100_000


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ({}, [], "empty"),
        ({0: "a"}, [], "bytes"),
        ({-1: b"a"}, [], "-1"),
        ({0: b"a", 1: b"a"}, [], "several ids"),
        ({0: b"a", 1: b"b"}, [(b"a", b"b")], "Merge 0"),
        ({0: b"a", 1: b"ab"}, [(b"a", b"b")], "Merge 0"),
    ],
)
def test_vocabulary_and_merges_that_do_not_fit(vocab, merges, message):
    with pytest.raises(UserError, match=message):
        Tokenizer(vocab, merges)
