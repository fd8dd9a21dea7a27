"""From a specification to a tokenizer; where GPT-2's files are looked for."""

import hashlib
import shutil

import pytest
import tiktoken.load

from lmcore.data import load_gpt2, tokenizer_for, tokenizers
from lmcore.errors import UserError
from lmcore.tokenizer import END_OF_TEXT, train_bpe


def test_specifications(tmp_path):
    corpus = tmp_path / "stories.txt"
    corpus.write_text("".join(f"\nStory é {i}.\n{END_OF_TEXT}\n" for i in range(20)))
    trained = tokenizer_for("bpe:280", corpus)
    assert trained.vocab_size <= 280
    assert trained.decode([trained.eot_id]) == END_OF_TEXT
    trained.save(tmp_path / "saved")
    assert tokenizer_for(tmp_path / "saved", corpus).fingerprint == trained.fingerprint
    for bad in ("bpe:", "bpe:many", "bpe:256", "bpe:-5"):
        with pytest.raises(UserError, match="bpe:10000"):
            tokenizer_for(bad, corpus)
    with pytest.raises(UserError, match="no tokenizer folder nowhere"):
        tokenizer_for("nowhere", corpus)
    with pytest.raises(UserError, match="not GPT-2's"):
        load_gpt2(tmp_path / "saved")


def test_bpe_sees_the_training_split_alone(tmp_path):
    """Whether it is cut from one file or is the folder's training file."""
    (tmp_path / "stories.txt").write_text(f"aaaa aaaa{END_OF_TEXT}" * 9 + "zqzqzqzq " * 50)
    tokens = tokenizer_for("bpe:270", tmp_path / "stories.txt").vocab.values()
    assert b"aaaa" in tokens
    assert b"zq" not in tokens
    (tmp_path / "folder").mkdir()
    for split, text in (("train", "aaaa " * 9), ("valid", "zqzq " * 50)):
        (tmp_path / "folder" / f"{split}.txt").write_text(text)
    expected = train_bpe(tmp_path / "folder" / "train.txt", 260, [END_OF_TEXT])
    assert tokenizer_for("bpe:260", tmp_path / "folder").merges == expected[1]


def test_load_gpt2_searches_variable_folder_and_cache(shared_data, tmp_path, monkeypatch):
    folder = shared_data / "gpt2"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizers, "BASE_URL", "http://127.0.0.1:9/gpt2/")
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"data/gpt2.*LMCORE_GPT2"):
        load_gpt2()
    (tmp_path / "cache").mkdir(exist_ok=True)
    for name in ("encoder.json", "vocab.bpe"):
        key = hashlib.sha1(f"http://127.0.0.1:9/gpt2/{name}".encode()).hexdigest()
        shutil.copyfile(folder / name, tmp_path / "cache" / key)
    assert load_gpt2(download=False).fingerprint == tokenizers.GPT2_FINGERPRINT
    (tmp_path / "cache" / key).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"vocab\.bpe is not on this machine; put"):
        load_gpt2(download=False)
    shutil.rmtree(tmp_path / "cache")
    shutil.copytree(folder, tmp_path / "data" / "gpt2")
    assert load_gpt2().vocab_size == 50_257
    for name, usual in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / "data" / "gpt2" / name).rename(tmp_path / "data" / "gpt2" / usual)
    assert load_gpt2(download=False).fingerprint == tokenizers.GPT2_FINGERPRINT
    monkeypatch.setenv("LMCORE_GPT2", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        load_gpt2()
    assert load_gpt2(folder).vocab_size == 50_257


def test_load_gpt2_uses_the_cache_of_tiktoken(tmp_path, monkeypatch):
    """The same variable, address and file name as in the installed tiktoken."""
    asked = []
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", lambda path: asked.append(path) or b"")
    for name, sha256 in tokenizers.SHA256.items():
        with pytest.raises(ValueError, match="Hash mismatch"):
            tiktoken.load.read_file_cached(tokenizers.BASE_URL + name, sha256)
    from tiktoken_ext import openai_public

    asked.clear()
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **files: asked.append(files) or {})
    openai_public.gpt2()
    assert asked[0] == {
        "vocab_bpe_file": tokenizers.BASE_URL + "vocab.bpe",
        "encoder_json_file": tokenizers.BASE_URL + "encoder.json",
        "vocab_bpe_hash": tokenizers.SHA256["vocab.bpe"],
        "encoder_json_hash": tokenizers.SHA256["encoder.json"],
    }
