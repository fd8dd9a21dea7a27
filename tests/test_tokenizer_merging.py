"""The plain merging loop for words and the fast one for long pretokens: equal ids, and work in proportion to length."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.tokenizer import Tokenizer
from lmcore.tokenizer.bpe import LONG, merge_ids, merge_long
from lmcore.tokenizer.pretokenize import count_pretokens
from lmcore.tokenizer.train import merge_pretokens

SPECIALS = ["<|endoftext|>"]
CORPUS = Path(__file__).read_text(encoding="utf-8") + "aaaa aaab café 語語語 " * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens, merges = merge_pretokens(count_pretokens(CORPUS), 400)
    return Tokenizer(dict(enumerate(tokens)), merges, SPECIALS)


class CountingRanks(dict):
    """Ranks that count how often they are asked for: the work of both encoders, whatever the machine does meanwhile."""

    asked = 0

    def get(self, pair, default=None):
        self.asked += 1
        return super().get(pair, default)

    def __contains__(self, pair):
        self.asked += 1
        return super().__contains__(pair)


@given(st.lists(st.sampled_from("aab \xe9t"), max_size=300).map("".join), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_long_and_short_merging_agree(tokenizer, text, draw):
    """Also where merges are out of the order of their training, so that a merge makes way for an earlier one."""
    for merges in (tokenizer.merges, draw.sample(tokenizer.merges, len(tokenizer.merges))):
        other = Tokenizer(tokenizer.vocab, merges)
        ids = list(text.encode())
        assert merge_long(ids, other._ranks, other._merged) == merge_ids(list(ids), other._ranks, other._merged)


@pytest.mark.parametrize("unit", ["a", " ", "ab", "é", "word", "-=", "".join(random.Random(0).choices("etaoin", k=97))])
def test_doubling_a_pretoken_doubles_the_work(tokenizer, unit):
    work = []
    for length in (4_000, 8_000, 16_000):
        ranks = CountingRanks(tokenizer._ranks)
        merge_long(list((unit * length)[:length].encode()), ranks, tokenizer._merged)
        work.append(ranks.asked)
    assert work[1] < 2.05 * work[0]
    assert work[2] < 2.05 * work[1]


def test_only_short_pretokens_take_the_quadratic_loop(tokenizer, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        "lmcore.tokenizer.bpe.merge_ids", lambda ids, *rest: lengths.append(len(ids)) or merge_ids(ids, *rest)
    )
    fresh = Tokenizer(tokenizer.vocab, tokenizer.merges, SPECIALS)
    fresh.encode("a" * 5_000 + " word " + "é" * LONG + "!" * LONG + "\n" * 3_000)
    assert lengths
    assert max(lengths) == LONG


def test_long_chunks_are_not_kept(tokenizer):
    fresh = Tokenizer(tokenizer.vocab, tokenizer.merges, SPECIALS)
    fresh.encode("word " + "a" * 5_000 + " 語,!" * 10 + "x,1" * 100)
    assert {"word", " ", "x", ","} & set(fresh._cache)
    assert max(map(len, fresh._cache)) <= LONG
