"""Tokenizer files, GPT-2's tokenizer, and the bridge to tiktoken."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from lmcore.data import tokenizers as gpt2
from lmcore.data.tokenizers import load_gpt2
from lmcore.errors import UserError
from lmcore.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer
from lmcore.tokenizer.pretokenize import count_pretokens
from lmcore.tokenizer.train import merge_pretokens

BYTES = [bytes([byte]) for byte in range(256)]


def small_tokenizer() -> Tokenizer:
    tokens, merges = merge_pretokens(count_pretokens("the cat sat on the mat, the café's cat \n\n 語語 語語 " * 3), 40)
    return Tokenizer(dict(enumerate(tokens)), merges, [END_OF_TEXT, "<a b>", "é"])


@pytest.fixture(scope="module")
def gpt2_folder(shared_data):
    return shared_data / "gpt2"


@pytest.fixture(scope="module")
def ours(gpt2_folder) -> Tokenizer:
    return load_gpt2(gpt2_folder)


@pytest.fixture(scope="module")
def theirs(gpt2_folder) -> tiktoken.Encoding:
    """GPT-2 as tiktoken itself reads it from its files."""
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(gpt2_folder / "vocab.bpe"), str(gpt2_folder / "encoder.json")
    )
    special_tokens = {END_OF_TEXT: 50_256}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special_tokens)


# characters of Unicode versions newer than either library's tables may be classed differently: leave them out (Cn)
any_text = st.lists(
    st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=12)
    | st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", "'s", "'LL", "don't", " 12"])
    | st.sampled_from([END_OF_TEXT, "<|endoftext", "नमस्ते", "👩‍👩‍👧‍👦", "Straße", "e\u0301", " the", "的中文", "x²"]),
    max_size=30,
).map("".join)


@given(any_text)
@settings(max_examples=400, deadline=None)
def test_gpt2_equals_tiktoken_on_any_text(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids) == text
    assert ours.encode_documents([text]) == [theirs.encode_ordinary(text)]


def test_gpt2_equals_tiktoken_on_real_text(ours, theirs, shared_data):
    for path in (shared_data / "tinystories" / "valid.txt", shared_data / "openwebtext" / "valid.txt"):
        text = path.read_text(encoding="utf-8")[:300_000]
        expected = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == expected
        assert list(ours.encode_iterable(text.splitlines(keepends=True))) == expected


def test_gpt2_ids(ours):
    assert ours.vocab_size == 50_257
    assert ours.eot_id == 50_256
    assert ours.encode("Hello world<|endoftext|>") == [15496, 995, 50256]


def test_save_and_load_keep_everything(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = Tokenizer.load(tmp_path / "new" / "folder")
    assert (loaded.vocab, loaded.merges) == (tokenizer.vocab, tokenizer.merges)
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.fingerprint == tokenizer.fingerprint
    text = "the café<a b>語 é<|endoftext|>"
    assert loaded.encode(text) == tokenizer.encode(text)
    (tmp_path / "new" / "folder" / "special_tokens.json").unlink()
    assert Tokenizer.load(tmp_path / "new" / "folder").special_tokens == [END_OF_TEXT]


def test_saved_gpt2_is_read_by_tiktoken(ours, theirs, tmp_path):
    ours.save(tmp_path)
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(tmp_path / "vocab.bpe"), str(tmp_path / "encoder.json"))
    assert ranks == theirs._mergeable_ranks
    assert Tokenizer.load(tmp_path).fingerprint == ours.fingerprint


def test_fingerprint_is_the_same_in_every_process_and_changes_with_every_part():
    tokenizer = small_tokenizer()
    code = "from test_tokenizer_files import small_tokenizer; print(small_tokenizer().fingerprint)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=__file__.rpartition("/")[0]
    )
    assert done.stdout.strip() == tokenizer.fingerprint
    vocab, merges, special_tokens = tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens
    swapped = vocab | {0: vocab[1], 1: vocab[0]}
    others = [
        Tokenizer(swapped, merges, special_tokens),
        Tokenizer(vocab, merges[:-1], special_tokens),
        Tokenizer(vocab, merges[::-1], special_tokens),
        Tokenizer(vocab, merges, special_tokens[:-1]),
    ]
    assert len({other.fingerprint for other in [tokenizer, *others]}) == 5
    assert Tokenizer(vocab, merges, special_tokens[::-1]).fingerprint == tokenizer.fingerprint


@given(any_text)
@settings(deadline=None)
def test_bridge_both_ways(text):
    tokenizer = BRIDGED
    encoding = tokenizer.to_tiktoken()
    # tiktoken does not promise the longest of overlapping special tokens; these do not overlap
    assert encoding.encode(text, allowed_special="all") == tokenizer.encode(text)
    assert encoding.decode(tokenizer.encode(text)) == text
    back = Tokenizer.from_tiktoken(encoding)
    assert (back.vocab, back.merges, sorted(back.special_tokens)) == (
        tokenizer.vocab,
        tokenizer.merges,
        sorted(tokenizer.special_tokens),
    )


BRIDGED = small_tokenizer()


def test_bridge_of_gpt2(ours, theirs):
    assert Tokenizer.from_tiktoken(theirs).fingerprint == ours.fingerprint
    encoding = ours.to_tiktoken()
    assert encoding.n_vocab == 50_257
    assert encoding._mergeable_ranks == theirs._mergeable_ranks


def test_special_tokens_first_still_bridge():
    tokenizer = small_tokenizer()
    tokens = [tokenizer.vocab[token_id] for token_id in sorted(tokenizer.vocab)]
    assert tokens[-2:] == [b"<|endoftext|>", b"<a b>"]
    moved = Tokenizer(dict(enumerate(tokens[-2:] + tokens[:-2])), tokenizer.merges, tokenizer.special_tokens)
    text = "the cat's café 語 <a b>"
    assert moved.to_tiktoken().encode(text, allowed_special="all") == moved.encode(text)


def test_encode_documents_reads_special_tokens_as_text():
    documents = ["the cat<|endoftext|>", "", "語"]
    encoded = BRIDGED.encode_documents(documents)
    assert [BRIDGED.decode(ids) for ids in encoded] == documents
    assert BRIDGED.eot_id not in encoded[0]
    assert encoded[1] == []


def test_what_tiktoken_cannot_express_is_refused():
    merges = [(b"a", b"b"), (b"ab", b"c")]
    unordered = Tokenizer(dict(enumerate([*BYTES, b"abc", b"ab"])), merges)
    with pytest.raises(UserError, match="order of the merges"):
        unordered.to_tiktoken()
    assert unordered.encode("abcab") == [256, 257]
    two_ways = Tokenizer(dict(enumerate([*BYTES, b"ab", b"bc", b"abc"])), [*merges[:1], (b"b", b"c"), (b"a", b"bc")])
    with pytest.raises(UserError, match="two ways"):
        two_ways.to_tiktoken()
    with pytest.raises(UserError, match="two ways"):
        two_ways.encode_documents(["abc"])


def test_encodings_that_are_not_gpt2s_kind_are_refused():
    ranks = {token: rank for rank, token in enumerate(BYTES)}
    other = tiktoken.Encoding("other", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    with pytest.raises(UserError, match="another pattern"):
        Tokenizer.from_tiktoken(other)
    orphan = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks | {b"abc": 256}, special_tokens={})
    with pytest.raises(UserError, match="no merge"):
        Tokenizer.from_tiktoken(orphan)


def test_load_gpt2_searches_variable_folder_and_cache(gpt2_folder, tmp_path, monkeypatch, ours):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpt2, "BASE_URL", "http://127.0.0.1:9/gpt2/")
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"data/gpt2.*LMCORE_GPT2"):
        load_gpt2()
    (tmp_path / "cache").mkdir(exist_ok=True)
    for name in ("encoder.json", "vocab.bpe"):
        key = hashlib.sha1(f"http://127.0.0.1:9/gpt2/{name}".encode()).hexdigest()
        shutil.copyfile(gpt2_folder / name, tmp_path / "cache" / key)
    assert load_gpt2(download=False).fingerprint == ours.fingerprint
    (tmp_path / "cache" / key).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"vocab\.bpe is not on this machine; put"):
        load_gpt2(download=False)
    shutil.rmtree(tmp_path / "cache")
    shutil.copytree(gpt2_folder, tmp_path / "data" / "gpt2")
    assert load_gpt2().fingerprint == ours.fingerprint
    monkeypatch.setenv("LMCORE_GPT2", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        load_gpt2()
    assert load_gpt2(gpt2_folder).fingerprint == ours.fingerprint


def test_load_gpt2_uses_the_cache_of_tiktoken(tmp_path, monkeypatch):
    """The same variable, address and file name as in the installed tiktoken."""
    asked = []
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", lambda path: asked.append(path) or b"")
    for name, sha256 in gpt2.SHA256.items():
        with pytest.raises(ValueError, match="Hash mismatch"):
            tiktoken.load.read_file_cached(gpt2.BASE_URL + name, sha256)
    from tiktoken_ext import openai_public

    asked.clear()
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **files: asked.append(files) or {})
    openai_public.gpt2()
    assert asked[0] == {
        "vocab_bpe_file": gpt2.BASE_URL + "vocab.bpe",
        "encoder_json_file": gpt2.BASE_URL + "encoder.json",
        "vocab_bpe_hash": gpt2.SHA256["vocab.bpe"],
        "encoder_json_hash": gpt2.SHA256["encoder.json"],
    }


def test_load_gpt2_refuses_another_tokenizer(tmp_path):
    small_tokenizer().save(tmp_path)
    with pytest.raises(UserError, match="not GPT-2's"):
        load_gpt2(tmp_path)


@pytest.mark.parametrize(
    ("encoder", "merges", "message"),
    [
        (None, "", "no file"),
        ("{", "", "JSON"),
        ("[1]", "", "not a tokenizer vocabulary"),
        ('{"a": "b"}', "", "not a tokenizer vocabulary"),
        ('{"a b": 0}', "", "byte alphabet"),
        ('{"a": 0, "b": 0}', "", "same id"),
        ('{"a": 0}', None, "no file"),
        ('{"a": 0}', b"\xff\xfe", "cannot be read"),
        ('{"a": 0}', "#version: 0.2\na\n", "line 2"),
        ('{"a": 0}', "a b\n", "Merge 0"),
    ],
)
def test_bad_files_are_named(encoder, merges, message, tmp_path):
    if encoder is not None:
        (tmp_path / "encoder.json").write_text(encoder)
    if merges is not None:
        (tmp_path / "vocab.bpe").write_bytes(merges if isinstance(merges, bytes) else merges.encode())
    with pytest.raises(UserError, match=message):
        Tokenizer.from_files(tmp_path / "encoder.json", tmp_path / "vocab.bpe")


def test_merges_file_without_header_and_with_hash_signs(tmp_path):
    (tmp_path / "merges.txt").write_text("# #\r\nh i\r\n")
    (tmp_path / "vocab.json").write_text(json.dumps({"#": 0, "##": 1, "h": 2, "i": 3, "hi": 4}))
    tokenizer = Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert tokenizer.merges == [(b"#", b"#"), (b"h", b"i")]
    assert tokenizer.encode("hi##") == [4, 1]
