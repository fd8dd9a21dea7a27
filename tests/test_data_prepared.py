"""Prepared corpora: what the folder holds, reuse, exact counts on real text, and every way it can be wrong."""

import copy
import dataclasses
import hashlib
import json
import math
import os
import shutil
from itertools import islice

import numpy as np
import pytest

import lmcore.data.prepared
from lmcore.cli.application import main
from lmcore.data import (
    CorpusConfig,
    entropy_per_document,
    log_probability,
    open_data,
    prepare,
    stories,
    tokenizer_for,
)
from lmcore.data.prepared import smallest_dtype
from lmcore.errors import UserError
from lmcore.files import read_json
from lmcore.tokenizer import Tokenizer

EOT = "<|endoftext|>"
BYTES = Tokenizer({i: bytes([i]) for i in range(256)} | {256: EOT.encode()}, [], [EOT])
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


def test_ids_are_the_documents_each_with_its_end(prepared):
    expected = [id for i in range(20) for id in [*f"Story é {i}.".encode(), 256]]
    assert np.concatenate([prepared.train, prepared.valid]).tolist() == expected
    assert prepared.tokenizer.decode(prepared.valid) == f"Story é 18.{EOT}Story é 19.{EOT}"
    assert prepared.train.dtype == np.uint16
    assert not prepared.train.flags.writeable


def test_manifest(prepared, corpus):
    manifest = read_json(prepared.folder / "manifest.json")
    assert manifest == prepared.manifest
    assert manifest["vocab_size"] == prepared.vocab_size == 257
    assert manifest["tokenizer_fingerprint"] == BYTES.fingerprint == prepared.tokenizer.fingerprint
    train = manifest["splits"]["train"]
    assert train["documents"] == 18
    assert train["tokens"] == len(prepared.train)
    assert train["bytes"] == train["tokens"] - 18
    assert math.isclose(train["bytes_per_token"], train["bytes"] / train["tokens"])
    assert (train["min_id"], train["max_id"]) == (prepared.train.min(), 256)
    assert train["sha256"] == hashlib.sha256((prepared.folder / "train.bin").read_bytes()).hexdigest()
    lengths = [len(f"Story é {i}.".encode()) + 1 for i in range(18)]
    assert math.isclose(train["tokens_per_document"], np.mean(lengths))
    assert math.isclose(train["tokens_per_document_standard_error"], np.std(lengths, ddof=1) / math.sqrt(18))
    (source,) = manifest["request"]["source"]["train_files"]
    assert source["sha256"] == hashlib.sha256(corpus.read_bytes()).hexdigest()
    assert prepared.floor_nats_per_token is None
    left = {path.name for path in prepared.folder.iterdir()} - {".lock", "checked.json"}
    assert left == {"manifest.json", "tokenizer", "train.bin", "valid.bin"}


def test_fingerprint_is_of_the_content(prepared, corpus, tmp_path):
    shutil.copy(corpus, tmp_path / "renamed.txt")
    same = prepare(tmp_path / "renamed.txt", BYTES, tmp_path / "elsewhere", progress=False)
    other = prepare(corpus, BYTES, tmp_path / "other", CorpusConfig(valid_fraction=0.5), progress=False)
    assert same.fingerprint == prepared.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("place", "decides"),
    [
        (("dtype",), True),
        (("vocab_size",), True),
        (("tokenizer_fingerprint",), True),
        (("splits", "train", "sha256"), True),
        (("splits", "valid", "sha256"), True),
        (("request", "source", "name"), False),
    ],
)
def test_fingerprint_is_of_all_that_decides_the_ids(prepared, place, decides):
    manifest = copy.deepcopy(prepared.manifest)
    *parents, key = place
    part = manifest
    for parent in parents:
        part = part[parent]
    part[key] = "another"
    assert (dataclasses.replace(prepared, manifest=manifest).fingerprint != prepared.fingerprint) == decides


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (50257, np.uint16), (65536, np.uint16), (65537, np.uint32)],
)
def test_smallest_dtype(vocab_size, dtype):
    assert smallest_dtype(vocab_size) == dtype


def test_embedded_corpus_knows_its_floor(tmp_path):
    data = prepare("embedded", "bpe:400", tmp_path, SMALL, progress=False)
    assert data.vocab_size <= 400
    assert data.tokenizer.decode(data.valid) == "".join(s + EOT for s in islice(stories(0, "valid"), 12))
    grammar = data.manifest["grammar"]
    assert grammar["seed"] == 0
    assert grammar["entropy_per_document"] == entropy_per_document()
    assert math.isclose(grammar["floor_nats_per_token"], entropy_per_document() / (len(data.train) / 60))
    assert data.floor_nats_per_token == grammar["floor_nats_per_token"]
    relative = grammar["tokens_per_document_standard_error"] / grammar["tokens_per_document"]
    assert math.isclose(grammar["floor_standard_error"], data.floor_nats_per_token * relative)
    surprise = -sum(map(log_probability, islice(stories(0, "valid"), 12)))
    assert math.isclose(grammar["valid_floor_nats_per_token"], surprise / len(data.valid))


def test_long_documents_keep_their_tokens(tmp_path):
    """One document of several pieces has the tokens of the whole, and one end."""
    text = " ".join(islice(stories(0), 9000))
    (tmp_path / "long.txt").write_text(f"{text}\n{EOT}\nshort")
    tokenizer = tokenizer_for("bpe:300", "embedded")
    data = prepare(tmp_path / "long.txt", tokenizer, tmp_path / "out", progress=False)
    assert data.train.tolist() == [*tokenizer.encode_documents([text])[0], tokenizer.eot_id]
    assert data.manifest["splits"]["train"]["documents"] == 1


def test_identical_request_is_reused(corpus, tmp_path, monkeypatch):
    first = prepare(corpus, "bpe:300", tmp_path / "out", progress=False)
    monkeypatch.setattr("lmcore.data.prepared.write_tokens", None)
    again = prepare(corpus, "bpe:300", tmp_path / "out", progress=False)
    assert again.fingerprint == first.fingerprint
    for tokenizer, config, options, text in (
        ("bpe:301", None, {}, None),
        ("bpe:300", CorpusConfig(valid_fraction=0.5), {}, None),
        ("bpe:300", None, {"reuse": False}, None),
        ("bpe:300", None, {}, "changed"),
    ):
        corpus.write_text(text or corpus.read_text())
        with pytest.raises(TypeError):  # it goes on to write_tokens, which is None here
            prepare(corpus, tokenizer, tmp_path / "out", config, progress=False, **options)
    assert open_data(tmp_path / "out").fingerprint == first.fingerprint


def test_validation_text_that_is_training_text_is_said(corpus, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("Another story.\n")
    fine = CorpusConfig(valid=str(other))
    prepare(corpus, BYTES, tmp_path / "fine", fine, progress=False)
    assert capsys.readouterr().err == ""
    same, part = CorpusConfig(valid=str(corpus)), CorpusConfig(valid=str(other), extra_train=(str(other),))
    said = "so the validation loss says nothing about other texts.\n"
    for _ in ("prepared", "reused"):
        prepare(corpus, BYTES, tmp_path / "same", same, progress=False)
        assert capsys.readouterr().err == f"{tmp_path}/same: Warning: the validation text is the training text, {said}"
    prepare(corpus, BYTES, tmp_path / "part", part, progress=False)
    words = "Warning: the validation text (other.txt) is part of the training text"
    assert capsys.readouterr().err == f"{tmp_path}/part: {words}, {said}"


@pytest.mark.parametrize("victim", ["train.bin", "manifest.json", "tokenizer"])
def test_a_damaged_folder_is_prepared_again(corpus, prepared, victim):
    path = prepared.folder / victim
    for file in path.iterdir() if path.is_dir() else [path]:
        file.write_bytes(b"{")
    assert prepare(corpus, BYTES, prepared.folder, progress=False).fingerprint == prepared.fingerprint
    assert open_data(prepared.folder, verify=True).tokenizer.fingerprint == BYTES.fingerprint


def test_failure_leaves_the_old_corpus(prepared, corpus):
    corpus.write_bytes(b"good text " * 300_000 + b"\xff")
    with pytest.raises(UserError, match="offset 3,000,000"):
        prepare(corpus, BYTES, prepared.folder, progress=False)
    again = open_data(prepared.folder, verify=True)
    assert again.fingerprint == prepared.fingerprint
    assert not list(prepared.folder.glob(".preparing-*"))


def test_another_corpus_replaces_it_and_open_memmaps_stay(prepared):
    before = prepared.train.tolist()
    new = prepare("embedded", BYTES, prepared.folder, SMALL, progress=False)
    assert prepared.train.tolist() == before
    assert new.manifest["splits"]["train"]["documents"] == 60
    assert open_data(prepared.folder).fingerprint == new.fingerprint != prepared.fingerprint


def wrong_size(folder):
    with open(folder / "train.bin", "ab") as file:
        file.write(b"\0")


def other_id(token_id):
    def change(folder):
        ids = np.fromfile(folder / "valid.bin", dtype=np.uint16)
        ids[3] = token_id
        ids.tofile(folder / "valid.bin")

    return change


def negative_id(folder):
    other_id(65535)(folder)
    edit(dtype="int16")(folder)


def edit(**changes):
    def change(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | changes))

    return change


def edit_train(**changes):
    def change(folder):
        splits = json.loads((folder / "manifest.json").read_text())["splits"]
        edit(splits=splits | {"train": splits["train"] | changes})(folder)

    return change


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (wrong_size, r"train\.bin has [\d,]+ bytes, but manifest\.json says [\d,]+ tokens of uint16"),
        (other_id(60_000), r"valid\.bin holds the token id 60,000, but the vocabulary has 257"),
        (other_id(7), r"valid\.bin has changed since it was prepared"),
        (negative_id, "holds the token id -1,"),
        (lambda folder: (folder / "train.bin").unlink(), r"train\.bin is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "not a prepared corpus .*lmcore data prepare"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "format version None"),
        (edit(format_version=99), "format version 99, but this lmcore reads 1"),
        (edit(dtype="uint32"), "tokens of uint32"),
        (edit(dtype="float16"), "not a whole manifest"),
        (edit(dtype="words"), "not a whole manifest"),
        (edit(splits={}), "not a whole manifest"),
        (edit_train(documents=17), r"train\.bin holds 18 documents, but manifest\.json says 17"),
        (edit_train(documents="18"), "not a whole manifest"),
        (edit_train(bytes=None), "not a whole manifest"),
        (edit(vocab_size=100), "the vocabulary has 100 entries"),
        (shutil.rmtree, "not a prepared corpus"),
    ],
)
def test_open_data_refuses(prepared, harm, sentence):
    harm(prepared.folder)
    with pytest.raises(UserError, match=sentence):
        open_data(prepared.folder)


def test_files_are_read_once(prepared, monkeypatch):
    """A second opening reads nothing; a changed time, or verify=True, has everything read again."""
    path, calls = prepared.folder / "valid.bin", []
    with monkeypatch.context() as patch:
        patch.setattr("lmcore.data.prepared.check_tokens", lambda array, manifest, split: calls.append(split))
        for verify, touched, read in ((False, False, 0), (False, True, 1), (False, False, 1), (True, False, 2)):
            if touched:
                os.utime(path, ns=(1, 1))
            open_data(prepared.folder, verify=verify)
            assert calls == ["train", "valid"] * read
    stat = path.stat()
    other_id(7)(prepared.folder)  # a change that keeps size and time
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match="has changed"):
        open_data(prepared.folder)


def test_ids_that_are_overwritten_while_they_are_in_use_are_noticed(prepared, corpus):
    data = open_data(prepared.folder)
    data.require_unchanged()
    os.chmod(data.folder / "valid.bin", 0o600)  # the same ids
    data.require_unchanged()
    prepare("embedded", BYTES, data.folder, SMALL, progress=False)  # what is mapped is another file
    data.require_unchanged()
    data = open_data(data.folder)
    other_id(7)(data.folder)
    with pytest.raises(UserError, match=r"valid\.bin has changed since it was prepared"):
        data.require_unchanged()
    shutil.rmtree(data.folder)  # what is mapped stays
    data.require_unchanged()


@pytest.mark.parametrize("victim", ["missing", "another", "damaged"])
def test_data_info_looks_at_the_tokenizer(prepared, victim, capsys):
    folder = prepared.folder / "tokenizer"
    assert main(["data", "info", str(prepared.folder)]) == 0
    capsys.readouterr()
    if victim == "missing":
        shutil.rmtree(folder)
    elif victim == "another":
        tokenizer_for("bpe:300", "embedded").save(folder)
    else:
        (folder / "encoder.json").write_text("{")
    assert main(["data", "info", str(prepared.folder)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "tokenizer" in said.err


def test_tokenizer_of_a_folder_is_checked(prepared):
    other = tokenizer_for("bpe:300", "embedded")
    other.save(prepared.folder / "tokenizer")
    with pytest.raises(UserError, match="not the one that made the tokens"):
        _ = open_data(prepared.folder).tokenizer
    shutil.rmtree(prepared.folder / "tokenizer")
    with pytest.raises(UserError, match=r"tokenizer folder .* is missing"):
        _ = open_data(prepared.folder).tokenizer


@pytest.mark.parametrize(("documents", "held_out"), [(2, 1), (49, 4), (155, 15), (900, 18)])
@pytest.mark.parametrize("scanned", [8, 1 << 22], ids=["pieces", "whole"])
def test_dev_is_the_last_fiftieth_or_fifteen_documents(tmp_path, monkeypatch, documents, held_out, scanned):
    texts = [f"story {number} ends" for number in range(documents)]
    (tmp_path / "train.txt").write_text("<|endoftext|>".join(texts))
    (tmp_path / "valid.txt").write_text("held out")
    config = CorpusConfig(valid=str(tmp_path / "valid.txt"))
    data = prepare(tmp_path / "train.txt", "bpe:257", tmp_path / "data", config, progress=False)
    monkeypatch.setattr(lmcore.data.prepared, "SCAN_BYTES", 8 * scanned)
    dev = data.evaluated_on("dev")
    assert dev.dev_documents == data.dev_documents == held_out
    decode = data.tokenizer.decode
    assert decode(dev.train.tolist()) == "".join(f"{text}<|endoftext|>" for text in texts[:-held_out])
    assert decode(dev.valid.tolist()) == "".join(f"{text}<|endoftext|>" for text in texts[-held_out:])
    assert dev.fingerprint == data.fingerprint
    assert data.evaluated_on("valid") is data


def test_one_document_leaves_nothing_for_dev(tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(f"one {name} story")
    config = CorpusConfig(valid=str(tmp_path / "valid.txt"))
    data = prepare(tmp_path / "train.txt", "bpe:257", tmp_path / "data", config, progress=False)
    with pytest.raises(UserError, match="has 1 training document, and dev, on which settings are chosen, needs anoth"):
        data.evaluated_on("dev")


def test_the_manifest_names_texts_of_wikitext(tmp_path, capfd):
    folder = tmp_path / "wikitext"
    folder.mkdir()
    (folder / "train.txt").write_text(
        " = A = \n \n a b <unk> \n<|endoftext|>\n = B = \n<|endoftext|>\n"
    )  # 9 and 4 words
    (folder / "valid.txt").write_text(" = C = \n" + " <unk> \n" * 20_000 + " a \n" * 88_821)  # 4 + 217,642
    first = prepare(folder, BYTES, tmp_path / "out", progress=False)
    train, valid = (first.manifest["wikitext"][split] for split in ("train", "valid"))
    assert train == {
        "words": 13,
        "unknown": 1 / 9,
        "is": "another text, as long as 0.00% of WikiText-103's training text",
    }
    assert valid["words"] == 217_646
    for again in (False, True):
        if again:
            prepare(folder, BYTES, tmp_path / "out", progress=False)
        said = capfd.readouterr().err
        assert "train is another text" in said
        assert "valid is the validation text in WikiText-2's form" in said
        assert "(217,646 words with ends of lines, 18.4% <unk>)" in said


def test_text_without_enough_for_both_splits(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match=r"train split of x\.txt has no text"):
        prepare(tmp_path / "x.txt", BYTES, tmp_path / "out", progress=False)
    with pytest.raises(UserError, match="not a prepared corpus"):
        open_data(tmp_path / "out")


def test_a_folder_that_cannot_be_written_and_a_full_disk(corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="Cannot write"):
        prepare(corpus, BYTES, corpus / "below", progress=False)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lmcore.data.prepared.encode_to", fail)
    with pytest.raises(UserError, match="No space left on device"):
        prepare(corpus, BYTES, tmp_path / "out", progress=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


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
