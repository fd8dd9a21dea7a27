"""Encoding and decoding against the naive reference and tiktoken; the tokenizer's files."""

import pickle
import random
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizer_reference as reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from lmcore.data import load_gpt2
from lmcore.errors import UserError
from lmcore.tokenizer import END_OF_TEXT, Tokenizer
from lmcore.tokenizer.pretokenize import count_pretokens
from lmcore.tokenizer.train import merge_pretokens

SPECIALS = [END_OF_TEXT, END_OF_TEXT * 2, "<pad >", "aa b"]
CORPUS = Path(__file__).read_text(encoding="utf-8") + "aaaa aaab café 語語語 " * 20
BYTES = [bytes([byte]) for byte in range(256)]


def trained(text: str, num_merges: int, special_tokens: list[str]) -> Tokenizer:
    tokens, merges = merge_pretokens(count_pretokens(text), num_merges)
    return Tokenizer(dict(enumerate(tokens)), merges, special_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained(CORPUS, 400, SPECIALS)


texts = st.lists(
    st.sampled_from([*SPECIALS, *CORPUS.split()[:200], " ", "\n", "  ", "<|", "a", "é", "語", "'s"])
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    max_size=30,
)


@settings(max_examples=50)
@given(texts.map("".join))
def test_encode_equals_the_naive_encoder_and_decode_inverts_it(tokenizer, text):
    ids = tokenizer.encode(text)
    assert [tokenizer.vocab[token_id] for token_id in ids] == reference.encode(text, tokenizer.merges, SPECIALS)
    assert tokenizer.decode(ids) == text


@example(["x", "<pad ", ">y"], 1, 1)
@given(texts, st.integers(1, 9), st.integers(1, 40) | st.none())
@settings(deadline=None)
def test_encode_iterable_equals_encode_for_any_cut_and_window(tokenizer, parts, step, window):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        if window is not None:
            patch.setattr("lmcore.tokenizer.bpe.PIECE_CHARACTERS", window)
        for cut in (parts, [text[at : at + step] for at in range(0, len(text), step)]):
            assert list(tokenizer.encode_iterable(cut)) == tokenizer.encode(text)


def test_a_pretoken_of_any_length_is_encoded_in_little_time(tokenizer):
    """Merging by rank alone would take an hour."""
    text = "".join(random.Random(0).choices("aab", k=300_000))
    assert tokenizer.encode(text) == tokenizer.tiktoken.encode_ordinary(text)


def test_encode_iterable_is_lazy_and_keeps_a_bounded_number_of_words(tokenizer, monkeypatch):
    monkeypatch.setattr("lmcore.tokenizer.bpe.CACHED_CHUNKS", 1000)
    fresh = Tokenizer(tokenizer.vocab, tokenizer.merges, SPECIALS)
    endless = (f"{number * number:x}\n" for number in count())
    assert len(list(islice(fresh.encode_iterable(endless), 20_000))) == 20_000
    assert len(fresh._cache) <= 1000


def test_overlapping_special_tokens_longest_first(tokenizer):
    one, two, pad = (tokenizer.encode(token) for token in SPECIALS[:3])
    assert [len(ids) for ids in (one, two, pad)] == [1, 1, 1]
    assert tokenizer.encode(END_OF_TEXT * 2 + "<pad >" + END_OF_TEXT) == two + pad + one
    assert one == [tokenizer.eot_id]
    for order in (SPECIALS, SPECIALS[::-1]):
        assert Tokenizer(tokenizer.vocab, tokenizer.merges, order).encode(END_OF_TEXT * 3) == two + one
    plain = Tokenizer(tokenizer.vocab, tokenizer.merges)  # without special tokens their text is ordinary
    assert len(plain.encode(END_OF_TEXT)) > 1
    assert plain.decode(plain.encode(END_OF_TEXT)) == END_OF_TEXT


def test_special_tokens_get_the_next_ids():
    vocab = dict(enumerate(BYTES))
    tokenizer = Tokenizer(vocab, [], ["<b>", "<a>", "<b>"])
    assert tokenizer.encode("<a><b>") == [257, 256]
    assert (tokenizer.vocab_size, len(vocab)) == (258, 256)
    with pytest.raises(UserError, match=r"no token <\|endoftext\|>"):
        tokenizer.eot_id  # noqa: B018
    for damaged in ([[]], [{}], ["\ud800"], [""]):
        with pytest.raises(UserError, match="must be a non-empty string of whole characters"):
            Tokenizer(vocab, [], damaged)


def test_vocabulary_without_all_bytes():
    """The example of CS336 A1 section 2.6.1."""
    tokens = [b" ", b"a", b"c", b"e", b"h", b"t", b"th", b" c", b" a", b"the", b" at"]
    merges = [(b"t", b"h"), (b" ", b"c"), (b" ", b"a"), (b"th", b"e"), (b" a", b"t")]
    tokenizer = Tokenizer(dict(enumerate(tokens)), merges)
    assert tokenizer.encode("the cat ate") == [9, 7, 1, 5, 10, 3]
    with pytest.raises(UserError, match="lacks the byte"):
        tokenizer.encode("the dog")
    with pytest.raises(UserError, match="256"):
        tokenizer.encode_documents(["the"])


def test_decode_takes_arrays_and_tensors_and_refuses_foreign_ids(tokenizer):
    ids = tokenizer.encode("some text")
    assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == tokenizer.decode(torch.tensor(ids)) == "some text"
    for foreign in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"^{foreign} is not a token id"):
            tokenizer.decode([*ids, foreign])


def test_vocabulary_and_merges_that_do_not_fit():
    for vocab, merges, sentence in (
        ({}, [], "empty"),
        ({0: b"a", 1: b"a"}, [], "several ids"),
        ({0: b"a", 1: b"b"}, [(b"a", b"b")], "Merge 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            Tokenizer(vocab, merges)


# ------------------------------------------------------------------------------------------------ GPT-2 and tiktoken


BRIDGED = trained("the cat sat on the mat, the café's cat \n\n 語語 語語 " * 3, 40, [END_OF_TEXT, "<a b>", "é"])


@pytest.fixture(scope="module")
def ours(shared_data) -> Tokenizer:
    return load_gpt2(shared_data / "gpt2")


@pytest.fixture(scope="module")
def theirs(shared_data) -> tiktoken.Encoding:
    """Read by tiktoken itself."""
    files = (str(shared_data / "gpt2" / name) for name in ("vocab.bpe", "encoder.json"))
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files)
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50_256})


# characters of Unicode versions newer than either library's tables may be classed differently: leave them out (Cn)
any_text = st.lists(
    st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=12)
    | st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", "'s", "'LL", "don't", " 12"])
    | st.sampled_from([END_OF_TEXT, "<|endoftext", "नमस्ते", "👩‍👩‍👧‍👦", "Straße", "e\u0301", " the", "的中文", "x²"]),
    max_size=30,
).map("".join)


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_gpt2_equals_tiktoken_on_any_text(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids) == text
    assert ours.encode_documents([text]) == [theirs.encode_ordinary(text)]


@given(any_text)
@settings(deadline=None)
def test_a_trained_tokenizer_equals_its_tiktoken(text):
    # tiktoken does not promise the longest of overlapping special tokens; these do not overlap
    assert BRIDGED.tiktoken.encode(text, allowed_special="all") == BRIDGED.encode(text)
    assert BRIDGED.tiktoken.decode(BRIDGED.encode(text)) == text
    assert BRIDGED.encode_documents([text]) == [BRIDGED.tiktoken.encode_ordinary(text)]  # specials read as text


@pytest.mark.skipif(find_spec("gigatoken") is None, reason="gigatoken is not installed")
@given(st.lists(any_text | st.text(), max_size=5))
@example(["", f"a{END_OF_TEXT}b", " " * 100_000, "a\ud800b", "\ud83d\ude42", "".join(map(chr, range(0x3000)))])
@settings(deadline=None)
def test_gigatoken_gives_the_ids_of_tiktoken(tokenizer, documents):
    fresh = Tokenizer({256 + rank: token for rank, token in enumerate(reversed(BYTES))}, [], [END_OF_TEXT])
    for each in (tokenizer, BRIDGED, fresh):
        assert each.encode_documents(documents) == each.tiktoken.encode_ordinary_batch(documents)
        assert each.gigatoken is not None
    assert pickle.loads(pickle.dumps(fresh)).encode_documents(documents) == fresh.encode_documents(documents)


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.encode("\ud83d\ude42") == tokenizer.encode("🙂")


def test_what_tiktoken_cannot_encode_is_refused():
    merges = [(b"a", b"b"), (b"ab", b"c")]
    unordered = Tokenizer(dict(enumerate([*BYTES, b"abc", b"ab"])), merges)
    two_ways = Tokenizer(dict(enumerate([*BYTES, b"ab", b"bc", b"abc"])), [*merges[:1], (b"b", b"c"), (b"a", b"bc")])
    assert unordered.encode("abcab") == [256, 257]
    for tokenizer, text, sentence in (
        (unordered, "abc", "order of the merges"),
        (two_ways, "abc", "two ways"),
        (BRIDGED, "x" + "\n" * 1_000_000, "more than 500,000 white-space characters"),  # tiktoken panics
    ):
        with pytest.raises(UserError, match=sentence):
            tokenizer.encode_documents([text])


# ------------------------------------------------------------------------------------------------ files


def test_save_and_load_keep_everything(tmp_path):
    folder = tmp_path / "new" / "folder"
    BRIDGED.save(folder)
    loaded = Tokenizer.load(folder)
    for name in ("vocab", "merges", "special_tokens", "fingerprint"):
        assert getattr(loaded, name) == getattr(BRIDGED, name)
    (folder / "special_tokens.json").unlink()
    assert Tokenizer.load(folder).special_tokens == [END_OF_TEXT]


def test_hugging_face_s_names_of_the_files(tmp_path):
    vocab = dict(enumerate([*BYTES, b"th", b"##", END_OF_TEXT.encode()]))
    Tokenizer(vocab, [(b"#", b"#"), (b"t", b"h")]).save(tmp_path)
    (tmp_path / "special_tokens.json").unlink()
    (tmp_path / "encoder.json").rename(tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"neither encoder\.json and vocab\.bpe, nor vocab\.json and merges\.txt"):
        Tokenizer.load(tmp_path)
    (tmp_path / "merges.txt").write_text("# #\r\nt h\r\n")  # no header
    assert Tokenizer.load(tmp_path).encode(f"the##{END_OF_TEXT}") == [256, 101, 257, 258]


def test_fingerprint_is_the_same_in_every_process_and_changes_with_every_part():
    assert BRIDGED.fingerprint == "b83b9fe3a48718308f77aa1b83ac8fa809df3e46f4be7c2df902a97cc4b932b5"
    vocab, merges, special_tokens = BRIDGED.vocab, BRIDGED.merges, BRIDGED.special_tokens
    others = [
        Tokenizer(vocab | {0: vocab[1], 1: vocab[0]}, merges, special_tokens),
        Tokenizer(vocab, merges[:-1], special_tokens),
        Tokenizer(vocab, merges[::-1], special_tokens),
        Tokenizer(vocab, merges, special_tokens[:-1]),
    ]
    assert len({other.fingerprint for other in [BRIDGED, *others]}) == 5
    assert Tokenizer(vocab, merges, special_tokens[::-1]).fingerprint == BRIDGED.fingerprint


@pytest.mark.parametrize(
    ("encoder", "merges", "message"),
    [
        ("{", b"", "JSON"),
        ('{"a": "b"}', b"", "not a tokenizer vocabulary"),
        ('{"a b": 0}', b"", "byte alphabet"),
        ('{"a": 0, "b": 0}', b"", "same id"),
        ('{"a": 0}', b"\xff\xfe", "not UTF-8"),
        ('{"a": 0}', b"#version: 0.2\na\n", "line 2"),
    ],
)
def test_bad_files_are_named(encoder, merges, message, tmp_path):
    with pytest.raises(UserError, match="no file"):
        Tokenizer.from_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
    (tmp_path / "encoder.json").write_text(encoder)
    (tmp_path / "vocab.bpe").write_bytes(merges)
    with pytest.raises(UserError, match=message):
        Tokenizer.from_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
