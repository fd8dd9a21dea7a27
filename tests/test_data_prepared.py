"""Prepared corpora: what the folder holds, reuse, exact counts on real text, and every way it can be wrong."""

import copy
import dataclasses
import hashlib
import math
import os
import random
import re
import shutil
from itertools import islice
from unittest.mock import Mock

import numpy as np
import pytest

import lmcore.data.prepared
from lmcore.cli import main
from lmcore.data import CorpusConfig, open_data, prepare
from lmcore.data.grammar import entropy_per_document, stories
from lmcore.data.prepared import smallest_dtype
from lmcore.errors import EXIT_USER_ERROR, UserError
from lmcore.files import read_json, verified
from lmcore.tokenizer import Tokenizer

EOT = "<|endoftext|>"
BYTES = Tokenizer({i: bytes([i]) for i in range(256)} | {256: EOT.encode()}, [], [EOT])
HELD = {"manifest.json", "tokenizer", "train.bin", "valid.bin"}
SMALL = CorpusConfig(num_documents=60, valid_fraction=0.2)


@pytest.fixture
def corpus(tmp_path):
    """A text file of 20 stories, the last two held out."""
    path = tmp_path / "stories.txt"
    path.write_text("".join(f"\nStory é {i}.\n{EOT}\n" for i in range(20)))
    return path


@pytest.fixture
def prepared(corpus, tmp_path):
    return prepare(corpus, BYTES, tmp_path / "prepared", progress=False)


def test_what_the_folder_holds(prepared, corpus):
    expected = [id for i in range(20) for id in [*f"Story é {i}.".encode(), 256]]
    assert np.concatenate([prepared.train, prepared.valid]).tolist() == expected
    assert prepared.tokenizer.decode(prepared.valid) == f"Story é 18.{EOT}Story é 19.{EOT}"
    assert (prepared.train.dtype, prepared.train.flags.writeable) == (np.uint16, False)
    assert verified(read_json(prepared.folder / "manifest.json")) == prepared.manifest
    assert prepared.vocab_size == 257
    assert prepared.manifest["splits"]["train"] == {
        "tokens": len(prepared.train), "documents": 18, "bytes": len(prepared.train) - 18,
        "sha256": hashlib.sha256((prepared.folder / "train.bin").read_bytes()).hexdigest(),
    }  # fmt: skip
    (source,) = prepared.manifest["request"]["source"]["train_files"]
    assert source["sha256"] == hashlib.sha256(corpus.read_bytes()).hexdigest()
    assert prepared.floor_nats_per_token is None
    assert held(prepared.folder) == HELD


def held(folder):
    return {path.name for path in folder.iterdir()} - {".lock", "checked.json"}


def test_fingerprint_is_of_all_that_decides_the_ids(prepared):
    deciding = ["dtype", "vocab_size", "tokenizer_fingerprint", "splits train sha256", "splits valid sha256"]
    for place in [*deciding, "request source name"]:
        *parents, key = place.split()
        part = manifest = copy.deepcopy(prepared.manifest)
        for parent in parents:
            part = part[parent]
        part[key] = "another"
        same = dataclasses.replace(prepared, manifest=manifest).fingerprint == prepared.fingerprint
        assert same == (place not in deciding)


def test_smallest_dtype():
    sizes = {256: np.uint8, 257: np.uint16, 50257: np.uint16, 65536: np.uint16, 65537: np.uint32}
    assert {size: smallest_dtype(size) for size in sizes} == sizes


def test_embedded_corpus_knows_its_floor(tmp_path):
    data = prepare("embedded", BYTES, tmp_path, SMALL, progress=False)
    assert data.tokenizer.decode(data.valid) == "".join(s + EOT for s in islice(stories(0, "valid"), 12))
    assert math.isclose(data.floor_nats_per_token, entropy_per_document() / (len(data.train) / 60))


def test_identical_request_is_reused_and_another_is_not(corpus, tmp_path, monkeypatch):
    first = prepare(corpus, BYTES, tmp_path / "out", progress=False)
    monkeypatch.setattr("lmcore.data.prepared.write_tokens", None)
    assert prepare(corpus, BYTES, tmp_path / "out", progress=False).fingerprint == first.fingerprint
    for tokenizer, fraction, text in (("bpe:257", 0.1, None), (BYTES, 0.5, None), (BYTES, 0.1, "changed")):
        corpus.write_text(text or corpus.read_text())
        with pytest.raises(TypeError):  # it goes on to write_tokens, which is None here
            prepare(corpus, tokenizer, tmp_path / "out", CorpusConfig(valid_fraction=fraction), progress=False)
    assert open_data(tmp_path / "out").fingerprint == first.fingerprint


def test_validation_text_that_is_training_text_is_said(tmp_path, capfd):
    text = tmp_path / "text.txt"
    text.write_text("a b\n<|endoftext|>\nc\n")
    for _ in range(2):  # when it is prepared, and when it is reused
        prepare(text, BYTES, tmp_path / "out", CorpusConfig(valid=str(text)), progress=False)
        assert "Warning: the validation text is training text, so" in capfd.readouterr().err


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(corpus, prepared, monkeypatch):
    named = corpus.with_name(os.fsdecode(b"caf\xe9.txt"))
    named.write_text(corpus.read_text())
    monkeypatch.setattr("lmcore.data.prepared.write_tokens", None)
    for source, config in ((named, None), (corpus, CorpusConfig(valid=str(named)))):
        with pytest.raises(UserError, match=r"^The name caf\\xe9\.txt is not UTF-8; rename it\.$"):
            prepare(source, BYTES, prepared.folder, config, progress=False)


def test_a_folder_named_like_the_tokenizers_is_not_replaced(corpus, tmp_path):
    (tmp_path / "mine" / "tokenizer").mkdir(parents=True)
    with pytest.raises(UserError, match="is of no corpus and would be replaced: choose another folder"):
        prepare(corpus, BYTES, tmp_path / "mine", progress=False)


def other_id(folder):
    """A change that keeps the size."""
    ids = np.fromfile(folder / "valid.bin", dtype=np.uint16)
    ids[3] = 7
    ids.tofile(folder / "valid.bin")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: (folder / "train.bin").write_bytes(b"\0"), r"train\.bin does not hold the"),
        (lambda folder: (folder / "train.bin").unlink(), r"train\.bin does not hold the"),
        (other_id, r"valid\.bin has changed since it was prepared"),
        (lambda folder: (folder / "manifest.json").unlink(), "make one with `lmcore data prepare`"),
    ],
)
def test_open_data_refuses_what_prepare_makes_again(corpus, prepared, harm, sentence):
    harm(prepared.folder)
    with pytest.raises(UserError, match=sentence):
        open_data(prepared.folder)
    assert prepare(corpus, BYTES, prepared.folder, progress=False).fingerprint == prepared.fingerprint


def test_no_field_of_the_manifest_changes_in_silence(prepared):
    """One letter or digit at random places; the checksum, too."""
    path, sentence = prepared.folder / "manifest.json", r"manifest\.json (is of another version|cannot be)"
    whole = path.read_text()
    places = [found.start() for found in re.finditer(r"[a-z1-9]", whole)]
    for place in random.Random(0).sample(places, 100):
        path.write_text(whole[:place] + ("1" if whole[place] != "1" else "2") + whole[place + 1 :])
        with pytest.raises(UserError, match=sentence):
            open_data(prepared.folder)


def test_files_are_read_once(prepared, monkeypatch):
    """A second opening reads nothing; a changed file is read again, also if its size and time are the same."""
    path, calls = prepared.folder / "valid.bin", []
    with monkeypatch.context() as patch:
        digest = lmcore.data.prepared.sha256_file
        patch.setattr(lmcore.data.prepared, "sha256_file", lambda path: calls.append(path.stem) or digest(path))
        open_data(prepared.folder)
        assert calls == []
        os.utime(path, ns=(1, 1))
        for _ in range(2):
            open_data(prepared.folder)
            assert calls == ["train", "valid"]
    other_id(prepared.folder)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="has changed"):
        open_data(prepared.folder)


def test_the_tokenizer_is_checked(corpus, prepared, capsys):
    folder = prepared.folder / "tokenizer"
    for harm in (
        lambda: Tokenizer(BYTES.vocab | {257: b"ab"}, [], [EOT]).save(folder),
        lambda: (folder / "encoder.json").write_text("{"),
        lambda: shutil.rmtree(folder),
    ):
        harm()
        data = open_data(prepared.folder)  # it is loaded when it is needed
        with pytest.raises(UserError, match="tokenizer"):
            _ = data.tokenizer
        assert main(["data", "info", str(prepared.folder)]) == EXIT_USER_ERROR
        assert "tokenizer" in capsys.readouterr().err
    assert prepare(corpus, BYTES, prepared.folder, progress=False).tokenizer.fingerprint == BYTES.fingerprint


@pytest.mark.parametrize(("documents", "held_out"), [(2, 1), (49, 4), (155, 15), (900, 18)])
def test_dev_is_the_last_fiftieth_or_fifteen_documents(tmp_path, monkeypatch, documents, held_out):
    texts = [f"story {number} ends{EOT}" for number in range(documents)]
    (tmp_path / "train.txt").write_text("".join(texts))
    (tmp_path / "valid.txt").write_text("held out")
    data = prepare(tmp_path, BYTES, tmp_path / "data", progress=False)
    monkeypatch.setattr(lmcore.data.prepared, "SCANNED", 1 if documents < 50 else 1 << 20)
    assert data.evaluated_on("valid") is data
    dev = data.evaluated_on("dev")
    assert dev.dev_documents == held_out
    assert data.tokenizer.decode(dev.train) == "".join(texts[:-held_out])
    assert data.tokenizer.decode(dev.valid) == "".join(texts[-held_out:])
    assert dev.fingerprint == data.fingerprint


def test_a_short_text_a_folder_that_cannot_be_written_and_a_full_disk(corpus, tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match=r"train split of x\.txt has no text"):
        prepare(tmp_path / "x.txt", BYTES, tmp_path / "out", progress=False)
    with pytest.raises(UserError, match="cannot be written to"):
        prepare(corpus, BYTES, corpus / "below", progress=False)
    monkeypatch.setattr("lmcore.data.prepared.encode_to", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left on device"):
        prepare(corpus, BYTES, tmp_path / "out", progress=False)
    assert held(tmp_path / "out") == set()


def test_tinystories_has_the_known_number_of_tokens(shared_data, tmp_path):
    """Stories joined by the token alone, GPT-2's tokenizer: 7,799,081 tokens to train on, 1,269,654 to validate on."""
    for name in ("tinystories", "gpt2"):
        if not (shared_data / name).is_dir():
            pytest.skip(f"there is no {shared_data / name}")
    data = prepare(shared_data / "tinystories", shared_data / "gpt2", tmp_path, progress=False)
    assert (len(data.train), len(data.valid)) == (7_799_081, 1_269_654)
    assert data.manifest["splits"]["train"]["documents"] == 40_049
    assert data.train.dtype == np.uint16
    assert data.vocab_size == 50_257
