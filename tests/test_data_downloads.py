"""Downloads, against a server on this machine: whole, broken off, absent; and WikiText as text."""

import hashlib
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from lmcore.data.downloads import (
    SOURCES,
    download,
    download_parquet,
    end_articles,
    fetch,
    wikitext_as_text,
)
from lmcore.errors import UserError

CONTENT = random.Random(0).randbytes(300_000)
URL = "https://huggingface.co/some/folder/corpus.txt"


@pytest.fixture
def site(monkeypatch):
    """A mirror of Hugging Face: the files that it has by path, whether answers break off, and what was asked for."""
    site = SimpleNamespace(files={"/some/folder/corpus.txt": CONTENT}, breaks=False, requests=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.removeprefix("/mirror")
            site.requests.append(path)
            content = site.files[path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if site.breaks else content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/mirror/")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield site
        server.shutdown()


def test_a_file_is_downloaded_once_and_again_if_its_known_checksum_is_not_that(site, tmp_path):
    path = fetch(URL, tmp_path, progress=False)
    assert (path, path.read_bytes()) == (tmp_path / "corpus.txt", CONTENT)
    assert fetch(URL, tmp_path) == path
    assert site.requests == ["/some/folder/corpus.txt"]
    path.write_bytes(CONTENT[:-5])
    assert fetch(URL, tmp_path, hashlib.sha256(CONTENT).hexdigest()).read_bytes() == CONTENT


def test_what_fails_leaves_nothing(site, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="hash"):
        fetch(URL, tmp_path, "0" * 64, progress=False)
    site.breaks = True
    with pytest.raises(UserError, match="Cannot download http"):
        fetch(URL, tmp_path, progress=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/some.*refused.*HF_ENDPOINT"):
        fetch(URL, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


LINES = [" \n", " = First = \n", " \n", " Text with \n", " = x = \n", " in it . \n", " \n", " = = Part = = \n", " \n"]


def test_wikitext_comes_from_parquet(site, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is of the extra data")
    from pyarrow import parquet

    # the parquet files have empty strings for blank lines
    rows = [line.strip(" \n") and line for line in LINES]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "file")
    for split in ("train", "valid"):
        for url in SOURCES["wikitext103"][split]:
            site.files[url.removeprefix("https://huggingface.co")] = (tmp_path / "file").read_bytes()
    files = download("wikitext103", tmp_path / "downloads", progress=False)
    eot = "<|endoftext|>\n"
    assert files["valid"].read_text() == "".join([*LINES, eot])
    assert files["train"].read_text() == "".join([*LINES, " \n", eot, *LINES[1:], eot])  # no end before = x =
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"a\.parquet is not a whole Parquet file"):
        wikitext_as_text([tmp_path / "a.parquet"], tmp_path / "text.txt")
    assert not (tmp_path / "text.txt").exists()


def test_a_data_set_of_hugging_face(site, tmp_path):
    """As its Parquet files, which Hugging Face lists: they are fetched once, whatever their form."""

    def address(part: str, split: str, number: int) -> str:
        return f"/api/datasets/o/tales/parquet/{part}/{split}/{number}.parquet"

    def listed(part: str, **splits: int) -> dict[str, list[str]]:
        return {
            split: ["https://huggingface.co" + address(part, split, number) for number in range(count)]
            for split, count in splits.items()
        }

    parts = {"en": listed("en", train=2, validation=1), "de": listed("de", test=1)}
    site.files["/api/datasets/o/tales/parquet"] = json.dumps(parts).encode()
    for split, number in (("train", 0), ("train", 1), ("validation", 0)):
        site.files[address("en", split, number)] = f"{split} {number}".encode()
    for _ in range(2):
        files = download_parquet("hf:o/tales/en", tmp_path, progress=False)
        texts = {split: [path.read_text() for path in paths] for split, paths in files.items()}
        assert texts == {"train": ["train 0", "train 1"], "valid": ["validation 0"]}
    assert len(site.requests) == 4
    for name, sentence in (
        ("hf:o/tales", "hf:o/tales has the parts en, de; name one"),
        ("hf:o/tales/fr", "hf:o/tales has the parts en, de; name one"),
        ("hf:o/tales/de", "hf:o/tales/de has no split train, but test"),
        ("hf:tales", "must be hf:OWNER/NAME"),
    ):
        with pytest.raises(UserError, match=sentence):
            download_parquet(name, tmp_path, progress=False)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_real_texts_have_the_published_articles(shared_data, split):
    path = shared_data / "wikitext103" / f"{split}.txt"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    text = end_articles(path.read_bytes())
    assert text.count(b"<|endoftext|>\n") == 60
    assert text.replace(b"<|endoftext|>\n", b"") == path.read_bytes()
