"""Documents from files and folders: streaming, splitting, the rule for folders, broken files."""

import gzip
import subprocess
import sys

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.data import CorpusConfig, open_corpus
from lmcore.data.corpora import split_documents
from lmcore.errors import UserError
from lmcore.text import read_text
from lmcore.tokenizer import pretokens, train_bpe

EOT = "<|endoftext|>"


def texts(corpus, split):
    """Whole documents of a split."""
    documents, parts = [], []
    for piece in corpus.documents(split):
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert not parts
    return documents


def write(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{document}\n{EOT}\n" for document in documents).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def both(source, **options):
    """Documents of the two splits."""
    corpus = open_corpus(source, CorpusConfig(**options))
    return texts(corpus, "train"), texts(corpus, "valid")


def chunked(text, sizes):
    """`text` in chunks of the sizes, repeated."""
    position, turn = 0, 0
    while position < len(text):
        yield text[position : position + sizes[turn % len(sizes)]]
        position += sizes[turn % len(sizes)]
        turn += 1


# what a cut could go wrong with: white space of all kinds, contractions, letters beside digits, parts of the token
WHITE = [" ", "  ", "\n", "\t", "\u00a0", "\u3000"]
fragments = st.sampled_from([*WHITE, "a", "don't", "'s", "42", "½", "é", "漢字", "...", "🙂", "<|end", EOT, "x y"])


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(fragments, max_size=40).map("".join),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    piece_chars=st.integers(1, 12),
)
def test_pieces_are_the_documents_and_keep_their_tokens(text, sizes, piece_chars):
    """However the text arrives and wherever it is cut: same documents, same pretokens."""
    pieces = list(split_documents(chunked(text, sizes), piece_chars))
    expected = [stripped for document in text.split(EOT) if (stripped := document.strip())]
    documents = [[]]
    for piece in pieces:
        assert piece.text or piece.ends_document
        documents[-1].append(piece.text)
        if piece.ends_document:
            documents.append([])
    assert documents.pop() == []
    assert ["".join(parts) for parts in documents] == expected
    for parts, document in zip(documents, expected, strict=True):
        assert [token for part in parts for token in pretokens(part)] == pretokens(document)


def test_long_documents_are_cut():
    pieces = list(split_documents(chunked("word " * 1000 + EOT + "short", [50]), 100))
    assert len(pieces) > 40
    assert max(len(piece.text) for piece in pieces) <= 150
    assert sum(piece.ends_document for piece in pieces) == 2


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_read_text(tmp_path, name):
    text = "é漢🙂\r\n" * 400_000
    path = tmp_path / name
    data = b"\xef\xbb\xbf" + text.encode()
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    chunks = list(read_text(path))
    assert "".join(chunks) == text
    assert len(chunks) > 2


@pytest.mark.parametrize(("name", "where"), [("bad.txt", "offset 2,097,153 "), ("bad.txt.gz", "of its decompressed")])
def test_text_that_is_not_utf8(tmp_path, name, where):
    data = b"a" + "é".encode() * (1 << 20) + b"\xff and more"
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match="not UTF-8") as error:
        list(read_text(tmp_path / name))
    assert where in str(error.value)
    assert "2,097,153" in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("half_a_character.txt", "aé".encode()[:-1], "offset 1 "),
        ("cut.txt.gz", gzip.compress(b"some text " * 1000, mtime=0)[:-20], "not a whole gzip file"),
        ("other.txt.gz", b"not gzip at all", "not a whole gzip file"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", f" \n{EOT}\n \n{EOT}\n".encode(), "holds no text"),
    ],
)
def test_files_that_are_no_text(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as error:
        texts(open_corpus(tmp_path / name), "train")
    assert name in str(error.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".json", ".jsonl.gz"])
def test_records_are_refused_with_the_command_that_makes_text_of_them(tmp_path, suffix):
    """As a corpus, as a file named in the options, in a folder, and to train a tokenizer on."""
    table = pd.DataFrame({"id": [1, 2], "text": ["One, two.", 'A "dog"\nbarks.']})
    path = tmp_path / f"the train{suffix}"
    if ".json" in suffix:
        table.to_json(path, orient="records", lines="jsonl" in suffix)
    else:
        table.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    plain = write(tmp_path / "plain.txt", ["a", "b"])
    used = [lambda: open_corpus(path), lambda: open_corpus(plain, CorpusConfig(valid=str(path)))]
    used += [lambda: train_bpe(path, 300, []), lambda: train_bpe([plain, path], 300, [])]
    used += [lambda: open_corpus(tmp_path)] * (suffix != ".json")
    for use in used:
        with pytest.raises(UserError, match="holds records, not plain text") as error:
            use()
    command = str(error.value).splitlines()[1].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert texts(open_corpus(tmp_path / "the train.txt", CorpusConfig(valid=str(plain))), "train") == list(
        table["text"]
    )


def test_a_folder_whose_validation_text_is_in_records_is_refused(tmp_path):
    write(tmp_path / "train.txt", ["a", "b"])
    (tmp_path / "statistics.csv").write_text("n\n1\n")  # of no split: passed over
    assert both(tmp_path) == (["a"], ["b"])
    (tmp_path / "valid.jsonl").write_text('{"text": "c"}\n')
    with pytest.raises(UserError, match=r"valid\.jsonl holds records"):
        open_corpus(tmp_path)


def test_a_single_file_is_split_by_documents(tmp_path):
    documents = [f"Story {i}." for i in range(30)]
    path = write(tmp_path / "stories.txt.gz", documents)
    assert both(path) == (documents[:27], documents[27:])
    assert both(str(path), valid_fraction=0.5) == (documents[:15], documents[15:])
    assert both(write(tmp_path / "two.txt", ["a", "b"]), valid_fraction=0.99) == (["a"], ["b"])


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 400), st.floats(0.05, 0.95))
def test_a_single_document_is_split_between_lines(tmp_path_factory, lines, fraction):
    text = "\n".join(f"line {i} of the text" for i in range(lines))
    path = tmp_path_factory.mktemp("one") / "input.txt"
    path.write_text(text)
    (train,), (valid,) = both(path, valid_fraction=fraction)
    assert text in (f"{train}\n{valid}", f"{train} {valid}", train + valid)  # the last: within the first word
    assert abs(len(valid) / len(text) - fraction) < 0.05 + 25 / len(text)


def test_a_single_long_document_in_pieces(tmp_path):
    text = "\n".join(f"line {i} of the text" for i in range(200_000))
    (tmp_path / "input.txt").write_text(text)
    corpus = open_corpus(tmp_path / "input.txt")
    assert sum(1 for _ in corpus.documents("train")) > 2
    (train,), (valid,) = texts(corpus, "train"), texts(corpus, "valid")
    assert f"{train}\n{valid}" == text
    assert abs(len(valid) / len(text) - 0.1) < 0.001


@pytest.mark.parametrize(
    ("files", "options", "train", "valid"),
    [
        ({"train.txt": "a b", "validation.txt": "v"}, {}, "a b", "v"),
        ({"train.md": "a b", "val.txt.gz": "v"}, {}, "a b", "v"),
        ({"train_part.txt": "a b", "valid.txt": "v"}, {}, "a b", "v"),
        ({"TinyStoriesV2-GPT4-train.txt": "a b", "TinyStoriesV2-GPT4-valid.txt": "v"}, {}, "a b", "v"),
        ({"owt_train.txt.gz": "a b", "owt_valid.txt.gz": "v"}, {}, "a b", "v"),
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
    (tmp_path / ".hidden.txt").write_text("neither")
    assert both(tmp_path, **options) == (train.split(), valid.split())


def test_a_validation_file_that_is_named(tmp_path):
    stories, held = (write(tmp_path / f"{text}.txt", [text, text]) for text in "av")
    assert both(stories, valid=str(held)) == (["a", "a"], ["v", "v"])


def test_ambiguous_and_missing_sources(tmp_path):
    with pytest.raises(UserError, match="no text file"):
        open_corpus(tmp_path)
    write(tmp_path / "train_a.txt", ["a"])
    write(tmp_path / "train_b.txt", ["b"])
    with pytest.raises(UserError, match=r"several files for the split 'train' \(train_a.txt, train_b.txt\)"):
        open_corpus(tmp_path)
    gone = str(tmp_path / "gone.txt")
    for source, options, sentence in (
        (tmp_path / "nowhere", {}, r"no file or folder .*nowhere.*embedded, tinystories"),
        (tmp_path / "train_a.txt", {"valid": gone}, r"no file .*gone"),
        ("embedded", {"valid": "x.txt"}, "leave out valid"),
        ("embedded", {"valid_fraction": 0.0}, "valid_fraction must be between"),
        ("embedded", {"valid_fraction": 1.0}, "valid_fraction must be between"),
        ("embedded", {"num_documents": 0}, "num_documents must be a positive"),
    ):
        with pytest.raises(UserError, match=sentence):
            both(source, **options)


def test_embedded_splits():
    train, valid = both("embedded", seed=4, num_documents=50, valid_fraction=0.2)
    assert (len(train), len(valid)) == (50, 10)
    assert not set(train) & set(valid)
    assert train == both("embedded", seed=4, num_documents=50)[0]


def test_documents_of_the_real_corpora(shared_data):
    """Counts of documents as the corpora's description states them."""
    known = (("tinystories", "valid", 6445), ("openwebtext", "train", 2395), ("openwebtext", "valid", 100))
    for name, split, expected in known:
        if not (shared_data / name).is_dir():
            pytest.skip(f"there is no {shared_data / name}")
        corpus = open_corpus(shared_data / name)
        assert sum(piece.ends_document for piece in corpus.documents(split)) == expected
