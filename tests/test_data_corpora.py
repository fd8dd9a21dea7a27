"""Documents from files and folders: streaming, splitting, the rule for folders, broken files."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.data import CorpusConfig, TextCorpus, open_corpus
from lmcore.data.corpora import safe_cut, split_documents
from lmcore.errors import UserError
from lmcore.text import read_text
from lmcore.tokenizer import pretokens

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


def chunked(text, sizes):
    """`text` in chunks of the sizes, repeated."""
    position, turn = 0, 0
    while position < len(text):
        yield text[position : position + sizes[turn % len(sizes)]]
        position += sizes[turn % len(sizes)]
        turn += 1


# what a cut could go wrong with: white space of all kinds, contractions, letters beside digits, parts of the token
WHITE = [" ", "  ", "\n", "\t", "\u00a0", "\u3000", "\x1c"]
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
        assert piece.text
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
    assert [piece.ends_document for piece in pieces[-2:]] == [True, True]


def test_safe_cut():
    assert safe_cut("one two three", 9) == 7
    assert safe_cut("one two three", 7) == 3
    assert safe_cut("one  ?wo", 8) == 0
    assert safe_cut("onetwothree", 9) == 0


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_read_text(tmp_path, name):
    text = "é漢🙂\r\n" * 400_000
    path = tmp_path / name
    data = b"\xef\xbb\xbf" + text.encode()
    path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    read = []
    chunks = list(read_text(path, read.append))
    assert "".join(chunks) == text
    assert len(chunks) > 2
    assert sum(read) == path.stat().st_size


@pytest.mark.parametrize(("name", "where"), [("bad.txt", "offset 2,097,153 "), ("bad.txt.gz", "of its decompressed")])
def test_text_that_is_not_utf8(tmp_path, name, where):
    data = b"a" + "é".encode() * (1 << 20) + b"\xff and more"
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    with pytest.raises(UserError, match="not UTF-8") as error:
        list(read_text(tmp_path / name))
    assert where in str(error.value)
    assert "2,097,153" in str(error.value)
    assert name in str(error.value)


def test_text_that_ends_within_a_character(tmp_path):
    (tmp_path / "cut.txt").write_bytes("aé".encode()[:-1])
    with pytest.raises(UserError, match="offset 1 "):
        list(read_text(tmp_path / "cut.txt"))


def test_files_that_are_no_text(tmp_path):
    whole = gzip.compress(b"some text " * 1000)
    (tmp_path / "cut.txt.gz").write_bytes(whole[:-20])
    (tmp_path / "other.txt.gz").write_bytes(b"not gzip at all")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_text(f" \n{EOT}\n \n{EOT}\n")
    for name, sentence in (
        ("cut.txt.gz", "not a whole gzip file"),
        ("other.txt.gz", "not a whole gzip file"),
        ("empty.txt", "holds no text"),
        ("blank.txt", "holds no text"),
    ):
        with pytest.raises(UserError, match=sentence) as error:
            texts(open_corpus(tmp_path / name), "train")
        assert name in str(error.value)


def test_a_single_file_is_split_by_documents(tmp_path):
    documents = [f"Story {i}." for i in range(30)]
    path = write(tmp_path / "stories.txt.gz", documents)
    corpus = open_corpus(path)
    assert texts(corpus, "train") == documents[:27]
    assert texts(corpus, "valid") == documents[27:]
    half = open_corpus(str(path), CorpusConfig(valid_fraction=0.5))
    assert (len(texts(half, "train")), len(texts(half, "valid"))) == (15, 15)
    two = open_corpus(write(tmp_path / "two.txt", ["a", "b"]), CorpusConfig(valid_fraction=0.99))
    assert (texts(two, "train"), texts(two, "valid")) == (["a"], ["b"])


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 400), st.floats(0.05, 0.95))
def test_a_single_document_is_split_between_lines(tmp_path_factory, lines, fraction):
    text = "\n".join(f"line {i} of the text" for i in range(lines))
    path = tmp_path_factory.mktemp("one") / "input.txt"
    path.write_text(text)
    corpus = open_corpus(path, CorpusConfig(valid_fraction=fraction))
    (train,), (valid,) = texts(corpus, "train"), texts(corpus, "valid")
    assert text in (f"{train}\n{valid}", f"{train} {valid}")
    assert abs(len(valid) / len(text) - fraction) < 0.05 + 25 / len(text)


def test_a_single_long_document_in_pieces(tmp_path):
    text = "\n".join(f"line {i} of the text" for i in range(200_000))
    (tmp_path / "input.txt").write_text(text)
    corpus = open_corpus(tmp_path / "input.txt")
    assert sum(1 for _ in corpus.documents("train")) > 2
    (train,), (valid,) = texts(corpus, "train"), texts(corpus, "valid")
    assert f"{train}\n{valid}" == text
    assert abs(len(valid) / len(text) - 0.1) < 0.001


def test_an_explicit_validation_file(tmp_path):
    path = write(tmp_path / "stories.txt", ["a", "b"])
    valid = write(tmp_path / "held.txt", ["v"])
    corpus = open_corpus(path, CorpusConfig(valid=str(valid)))
    assert (texts(corpus, "train"), texts(corpus, "valid")) == (["a", "b"], ["v"])


def test_folder_with_exact_names(tmp_path):
    """A file that only begins with train is not taken unless it is asked for."""
    write(tmp_path / "train.txt.gz", ["a", "b"])
    write(tmp_path / "train_fragments.txt.gz", ["c"])
    write(tmp_path / "valid.txt", ["v"])
    corpus = open_corpus(tmp_path)
    assert (texts(corpus, "train"), texts(corpus, "valid")) == (["a", "b"], ["v"])
    more = open_corpus(tmp_path, CorpusConfig(extra_train=(str(tmp_path / "train_fragments.txt.gz"),)))
    assert (texts(more, "train"), texts(more, "valid")) == (["a", "b", "c"], ["v"])


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        ("train.txt", "validation.txt"),
        ("train.md", "val.txt.gz"),
        ("train_part.txt", "valid.txt"),
        ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"),
        ("owt_train.txt.gz", "owt_valid.txt.gz"),
    ],
)
def test_folder_with_split_words_in_its_names(tmp_path, train, valid):
    write(tmp_path / train, ["a", "b"])
    write(tmp_path / valid, ["v"])
    (tmp_path / "README").write_text("no text of the corpus")
    (tmp_path / ".hidden.txt").write_text("neither")
    corpus = open_corpus(tmp_path)
    assert (texts(corpus, "train"), texts(corpus, "valid")) == (["a", "b"], ["v"])


def test_folder_without_split_names(tmp_path):
    for name, documents in (("b.txt", ["3", "4"]), ("a.txt.gz", ["1", "2"]), ("trained.md", ["5"])):
        write(tmp_path / name, documents)
    corpus = open_corpus(tmp_path, CorpusConfig(valid_fraction=0.2))
    assert (texts(corpus, "train"), texts(corpus, "valid")) == (["1", "2", "3", "4"], ["5"])


def test_folder_with_training_file_only(tmp_path):
    write(tmp_path / "train.txt", ["1", "2", "3"])
    write(tmp_path / "notes.txt", ["n"])
    corpus = open_corpus(tmp_path)
    assert (texts(corpus, "train"), texts(corpus, "valid")) == (["1", "2"], ["3"])


def test_ambiguous_and_missing_sources(tmp_path):
    with pytest.raises(UserError, match="no text file"):
        open_corpus(tmp_path)
    write(tmp_path / "train_a.txt", ["a"])
    write(tmp_path / "train_b.txt", ["b"])
    with pytest.raises(UserError, match=r"several files for the split 'train' \(train_a.txt, train_b.txt\)"):
        open_corpus(tmp_path)
    with pytest.raises(UserError, match=r"no file or folder .*nowhere.*embedded, tinystories"):
        open_corpus(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no file .*gone"):
        open_corpus(tmp_path / "train_a.txt", CorpusConfig(valid=str(tmp_path / "gone.txt")))
    with pytest.raises(UserError, match=r"no file .*gone"):
        open_corpus(tmp_path / "train_a.txt", CorpusConfig(extra_train=(str(tmp_path / "gone.txt"),)))
    with pytest.raises(UserError, match="neither valid nor extra_train"):
        open_corpus("embedded", CorpusConfig(valid="x.txt"))


@pytest.mark.parametrize("options", [{"valid_fraction": 0.0}, {"valid_fraction": 1.0}, {"num_documents": 0}])
def test_bad_options(options):
    with pytest.raises(UserError, match=next(iter(options))):
        CorpusConfig(**options)


def test_embedded_splits():
    corpus = open_corpus("embedded", CorpusConfig(seed=4, num_documents=50, valid_fraction=0.2))
    train, valid = texts(corpus, "train"), texts(corpus, "valid")
    assert (len(train), len(valid)) == (50, 10)
    assert not set(train) & set(valid)
    assert train == texts(open_corpus("embedded", CorpusConfig(seed=4, num_documents=50)), "train")


def test_progress_adds_up(tmp_path):
    path = write(tmp_path / "train.txt.gz", [f"Story {i}." for i in range(100)])
    valid = write(tmp_path / "valid.txt", ["v"])
    for corpus in (TextCorpus("x", (path,), (valid,)), TextCorpus("x", (path,)), open_corpus("embedded")):
        for split in ("train", "valid"):
            seen = []
            list(corpus.documents(split, seen.append))
            assert sum(seen) == corpus.size(split)


def test_documents_of_the_real_corpora(shared_data):
    """Counts of documents as the corpora's description states them."""
    known = (("tinystories", "valid", 6445), ("openwebtext", "train", 2395), ("openwebtext", "valid", 100))
    for name, split, expected in known:
        if not (shared_data / name).is_dir():
            pytest.skip(f"there is no {shared_data / name}")
        corpus = open_corpus(shared_data / name)
        assert sum(piece.ends_document for piece in corpus.documents(split)) == expected
