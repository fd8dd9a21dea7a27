"""From a specification to a tokenizer; where GPT-2's files are looked for."""

import shutil

import pooch
import pytest

from lmcore.data import load_gpt2, tokenizer_for, tokenizers
from lmcore.errors import UserError
from lmcore.files import sha256_file
from lmcore.tokenizer import END_OF_TEXT


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
    (tmp_path / "stories.txt").write_text(f"aaaa aaaa{END_OF_TEXT}" * 9 + "zqzqzqzq " * 50)
    tokens = tokenizer_for("bpe:270", tmp_path / "stories.txt").vocab.values()
    assert b"aaaa" in tokens
    assert b"zq" not in tokens


def test_load_gpt2_searches_variable_folder_and_cache(shared_data, tmp_path, monkeypatch):
    folder, cache = shared_data / "gpt2", tmp_path / "cache" / "gpt2"
    assert {name: sha256_file(folder / name) for name in tokenizers.SHA256} == tokenizers.SHA256
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizers, "BASE_URL", "http://127.0.0.1:9/gpt2/")
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path / "cache")
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    for download in (False, True):
        with pytest.raises(UserError, match=r"data/gpt2.*LMCORE_GPT2"):
            load_gpt2(download=download)
    shutil.copytree(folder, cache, dirs_exist_ok=True)
    assert load_gpt2().fingerprint == tokenizers.GPT2_FINGERPRINT
    (tmp_path / "data").mkdir()
    cache.rename(tmp_path / "data" / "gpt2")
    assert load_gpt2(download=False).vocab_size == 50_257
    monkeypatch.setenv("LMCORE_GPT2", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        load_gpt2()
    assert load_gpt2(folder).vocab_size == 50_257
