"""Documents from files and folders: streaming, splitting, the rule for folders, broken files."""

import gzip
import shutil
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.data import CorpusConfig, open_corpus, prepare
from lmcore.data.corpora import split_documents
from lmcore.errors import UserError
from lmcore.text import read_text
from lmcore.tokenizer import train_bpe

zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

EOT = "<|endoftext|>"


def write(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{document}\n{EOT}\n" for document in documents).encode()
    path.write_bytes({".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)(data))
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
        ("stories.json", b'{"text": "One."}', "holds records, not plain text"),
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


BAD = b"""{"text": "One, \\u00e9."}

{"text": "half
{"title": "no text", "n": 1}
\xff
{"text": 7}
["text"]
{"text": "\\ud800"}
{"text": "Two.", "n": 2}
"""
FAULTS = """6 records skipped: line 3 is not JSON, line 4 has no text in the field 'text', of ['title', 'n'], \
line 5 is not UTF-8, line 6 has no text in the field 'text', of ['text'], line 7 has no text in the field 'text', …"""


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_bad_lines_of_records_are_counted_and_named(tmp_path, ending):
    path = tmp_path / f"stories.jsonl{ending}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[ending](BAD))
    corpus = open_corpus(path)
    assert [list(corpus.documents(split)) for split in ("train", "valid")] == [["One, é."], ["Two."]]
    assert corpus.skipped == {path: f" ({FAULTS})"}
    data = prepare(path, "bpe:257", tmp_path / "out", progress=False)
    assert data.manifest["skipped"] == {path.name: f" ({FAULTS})"}
    with pytest.raises(UserError, match=r"holds no text \(8 records skipped: line 1 has no text"):
        both(path, field="nothing")
    if ending:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(UserError, match="is not a whole"):
            both(path)


def test_rows_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is of the extra data")
    from pyarrow import parquet

    path = tmp_path / "train-0.parquet"
    parquet.write_table(pyarrow.table({"story": ["a", None, "b", "c"], "n": [1, 2, 3, 4]}), path)
    shutil.copy(path, tmp_path / "train-1.parquet")
    write(tmp_path / "valid.txt.zst", ["v"])
    corpus = open_corpus(tmp_path, CorpusConfig(field="story"))
    assert list(corpus.documents("train")) == [*"abcabc"]
    assert corpus.skipped[path] == " (1 records skipped: row 2 has no text in the column 'story')"
    data = prepare(tmp_path, "bpe:257", tmp_path / "out", CorpusConfig(field="story"), progress=False)
    assert data.tokenizer.decode(data.train) == "".join(f"{letter}{EOT}" for letter in "abcabc")
    with pytest.raises(UserError, match="has no column 'text', but story, n; name one with --field"):
        open_corpus(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        open_corpus(path, CorpusConfig(field="story"))


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("backports.zstd", "a.txt.zst")])
def test_a_package_that_lacks_is_named(tmp_path, monkeypatch, package, name):
    (tmp_path / name).write_bytes(b"")
    for module in (package, "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{name} needs (\S+), of the extra data: pip install \1\."):
        open_corpus(tmp_path / name)


def test_a_pattern_and_folders_in_folders(tmp_path):
    for name in ("a.txt", "deep/b.jsonl", ".hidden/c.txt"):
        write(tmp_path / name, ['{"text": "x"}', '{"text": "y"}'])
    words = '{"text": "x"}', '{"text": "y"}'
    assert both(tmp_path) == ([*words, "x"], ["y"])
    assert both(str(tmp_path / "**" / "*.jsonl")) == (["x"], ["y"])
    assert both(str(tmp_path / "?.txt")) == ([words[0]], [words[1]])
    with pytest.raises(UserError, match=r"no file or folder .*/dep/b\.jsonl; did you mean .*/deep/b\.jsonl\?"):
        open_corpus(tmp_path / "dep" / "b.jsonl")


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
    (tmp_path / "valid.csv").write_text("text\nc\n")
    with pytest.raises(UserError, match=r"valid\.csv holds records"):
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
