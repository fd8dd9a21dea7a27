"""From a specification to a tokenizer; where GPT-2's files are looked for."""

import shutil

import pooch
import pytest

from lmcore.data import load_gpt2, load_tokenizer, open_corpus, tokenizers
from lmcore.data.tokenizers import tokenizer_for
from lmcore.errors import UserError
from lmcore.tokenizer import END_OF_TEXT


def test_a_tokenizer_by_its_size_or_folder(tmp_path):
    """It is trained on the training split alone."""
    (tmp_path / "stories.txt").write_text(f"aaaa aaaa{END_OF_TEXT}" * 9 + "zqzqzqzq " * 50)
    corpus = open_corpus(tmp_path / "stories.txt")
    trained = tokenizer_for("bpe:270", corpus)
    assert trained.decode([trained.eot_id]) == END_OF_TEXT
    tokens = trained.vocab.values()
    assert (len(tokens) <= 270, b"aaaa" in tokens, b"zq" in tokens) == (True, True, False)
    trained.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == trained.fingerprint
    for bad, sentence in (
        ("bpe:many", "bpe:10000"),
        ("bpe:256", "bpe:10000"),
        ("nowhere", "no tokenizer folder nowhere"),
    ):
        with pytest.raises(UserError, match=sentence):
            tokenizer_for(bad, corpus)
    with pytest.raises(UserError, match="not GPT-2's"):
        load_gpt2(tmp_path / "saved")


def test_load_gpt2_reads_the_variables_folder_or_the_cache(shared_data, tmp_path, monkeypatch):
    folder = shared_data / "gpt2"
    monkeypatch.setattr(tokenizers, "BASE_URL", "http://127.0.0.1:9/gpt2/")
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path)
    monkeypatch.delenv("LMCORE_GPT2", raising=False)
    with pytest.raises(UserError, match=r"Cannot download http://127.*LMCORE_GPT2"):
        load_gpt2()
    shutil.copytree(folder, tmp_path / "gpt2", dirs_exist_ok=True)  # as pooch would put it there, with its checksums
    assert load_gpt2().fingerprint == tokenizers.GPT2_FINGERPRINT
    monkeypatch.setenv("LMCORE_GPT2", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        load_gpt2()
    assert load_gpt2(folder).vocab_size == 50_257
