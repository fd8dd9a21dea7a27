"""Documents from files and folders: streaming, splitting, the rule for folders, broken files."""

import gzip
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.data import CorpusConfig, open_corpus
from lmcore.data.corpora import split_documents
from lmcore.errors import UserError
from lmcore.text import read_text
from lmcore.tokenizer import train_bpe

EOT = "<|endoftext|>"


def write(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{document}\n{EOT}\n" for document in documents).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def both(source, **options):
    """Documents of the two splits."""
    corpus = open_corpus(source, CorpusConfig(**options))
    return list(corpus.documents("train")), list(corpus.documents("valid"))


fragments = st.sampled_from([" ", "\n", "\u3000", "a", "é", "🙂", "<|end", EOT, "x y"])


@settings(max_examples=150, deadline=None)
@given(st.lists(fragments, max_size=40).map("".join), st.integers(1, 9), st.integers(1, 12))
def test_documents_stand_between_the_tokens(text, step, piece_characters):
    """However the text arrives and wherever it is cut."""
    expected = [stripped for document in text.split(EOT) if (stripped := document.strip())]
    chunks = (text[at : at + step] for at in range(0, len(text), step))
    assert list(split_documents(chunks, piece_characters)) == expected


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_text_is_read_in_chunks_and_its_first_bad_byte_is_named(tmp_path, name):
    text = "é漢🙂\r\n" * 200_000
    path = tmp_path / name
    packed = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(packed(b"\xef\xbb\xbf" + text.encode()))
    chunks = list(read_text(path))
    assert "".join(chunks) == text
    assert len(chunks) > 2
    path.write_bytes(packed(b"a" + "é".encode() * (1 << 20) + b"\xff and more"))
    with pytest.raises(UserError, match=rf"{name} is not UTF-8 text: the byte at offset 2,097,153 "):
        list(read_text(path))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("half_a_character.txt", "aé".encode()[:-1], "offset 1 "),
        ("cut.txt.gz", gzip.compress(b"some text " * 1000, mtime=0)[:-20], "not a whole gzip file"),
        ("blank.txt", f"{EOT}{EOT}".encode(), "holds no text"),
        ("stories.jsonl", b'{"text": "One."}', "holds records, not plain text"),
    ],
)
def test_files_that_are_no_text(tmp_path, name, content, sentence):
    """As a corpus, as validation text, and to train a tokenizer on."""
    (tmp_path / name).write_bytes(content)
    plain = write(tmp_path / "plain.txt", ["a", "b"])
    for use in (
        lambda: both(tmp_path / name),
        lambda: both(plain, valid=str(tmp_path / name)),
        lambda: train_bpe(tmp_path / name, 300, [EOT]),
    ):
        with pytest.raises(UserError, match=sentence) as error:
            use()
        assert name in str(error.value)


def test_a_file_with_records_is_refused_with_the_command_that_makes_a_text_of_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "One, \\u00e9."}\n{"text": "Two."}\n')
    (tmp_path / "b.CSV.gz").write_bytes(gzip.compress('n,text\n1,"One, é."\n2,Two.\n'.encode()))
    for name, text in (("a.jsonl", "a.txt"), ("b.CSV.gz", "b.txt")):
        with pytest.raises(UserError, match="holds records, not plain text") as refused:
            open_corpus(tmp_path / name)
        command = str(refused.value).partition("such as text: ")[2].replace("python", sys.executable, 1)
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        assert both(tmp_path / text) == (["One, é."], ["Two."])


@pytest.mark.parametrize(("count", "fraction", "held_out"), [(2, 0.9, 1), (20, 0.01, 1), (60, 0.25, 15)])
def test_documents_of_one_file_are_split(tmp_path, count, fraction, held_out):
    documents = [f"Story {number}." for number in range(count)]
    train, valid = both(write(tmp_path / "stories.txt.gz", documents), valid_fraction=fraction)
    assert (train, valid) == (documents[:-held_out], documents[-held_out:])


def test_a_single_document_is_cut(tmp_path):
    (tmp_path / "input.txt").write_text("0123456789")
    assert both(tmp_path / "input.txt", valid_fraction=0.2) == (["01234567"], ["89"])


@pytest.mark.parametrize(
    ("files", "options", "train", "valid"),
    [
        ({"TinyStoriesV2-GPT4-train.txt": "a b", "owt_val.md": "v"}, {}, "a b", "v"),
        # a file that only begins with train is not taken beside one of exactly that name
        ({"train.txt.gz": "a b", "train_fragments.txt.gz": "c", "valid.txt": "v"}, {}, "a b", "v"),
        ({"b.txt": "3 4", "a.txt.gz": "1 2", "trained.md": "5"}, {"valid_fraction": 0.2}, "1 2 3 4", "5"),
        ({"train.txt": "1 2 3", "notes.txt": "n"}, {}, "1 2", "3"),
    ],
)
def test_splits_of_a_folder_by_the_names_of_its_files(tmp_path, files, options, train, valid):
    for name, documents in files.items():
        write(tmp_path / name, documents.split())
    (tmp_path / "README").write_text("no text of the corpus")
    (tmp_path / "about.json").write_text("{}")
    (tmp_path / ".hidden.txt").write_text("neither")
    assert both(tmp_path, **options) == (train.split(), valid.split())
    (tmp_path / "valid.jsonl").write_text('{"text": "c"}\n')
    with pytest.raises(UserError, match=r"several files for the split 'valid'|valid\.jsonl holds records"):
        open_corpus(tmp_path)


def test_ambiguous_and_missing_sources(tmp_path):
    with pytest.raises(UserError, match="no text file"):
        open_corpus(tmp_path)
    a, b = (write(tmp_path / f"train_{name}.txt", [name, name]) for name in "ab")
    assert both(a, valid=str(b)) == (["a", "a"], ["b", "b"])
    for source, options, sentence in (
        (tmp_path, {}, r"several files for the split 'train' \(train_a.txt, train_b.txt\)"),
        (tmp_path / "nowhere", {}, r"no file or folder .*nowhere.*embedded, tinystories"),
        (a, {"valid": str(tmp_path / "gone.txt")}, r"no file .*gone"),
        ("embedded", {"valid": "x.txt"}, "leave out valid"),
        ("embedded", {"valid_fraction": 1.0}, "valid_fraction must be between"),
        ("embedded", {"num_documents": 0}, "num_documents must be a positive"),
    ):
        with pytest.raises(UserError, match=sentence):
            both(source, **options)
