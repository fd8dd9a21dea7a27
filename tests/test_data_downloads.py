"""Downloads, against a server on this machine: whole, broken off, changed, corrupt, absent."""

import hashlib
import json
import random
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from lmcore.data.downloads import SOURCES, articles, describe_wikitext, download, fetch, wikitext_as_text
from lmcore.errors import UserError

CONTENT = random.Random(0).randbytes(3_000_000)
URL = "https://corpora.example/some/folder/corpus.txt"


@dataclass
class Site:
    """What the server has and how it misbehaves; `requests` are the Range headers it saw."""

    files: dict[str, bytes] = field(default_factory=dict)
    address: str = ""
    break_after: list[int] = field(default_factory=list)
    """Bytes after which each of the next answers breaks off."""
    ranges: bool = True
    etag: str | None = '"v1"'
    requests: list[str | None] = field(default_factory=list)


@pytest.fixture
def site():
    site = Site({"/some/folder/corpus.txt": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked = self.headers.get("Range")
            site.requests.append(asked)
            content = site.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = 0
            if asked and site.ranges and self.headers.get("If-Range") == site.etag:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            if site.etag:
                self.send_header("ETag", site.etag)
            self.end_headers()
            if site.break_after:
                self.wfile.write(content[start : start + site.break_after.pop(0)])
                self.wfile.flush()
                self.close_connection = True
            else:
                self.wfile.write(content[start:])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()
    thread.join()


def get(site, folder, **options):
    return fetch(URL, folder, mirror=site.address, progress=False, **options)


def visible(folder: Path):
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_fetch_records_and_reuses(site, tmp_path):
    path = get(site, tmp_path)
    assert path == tmp_path / "corpus.txt"
    assert path.read_bytes() == CONTENT
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (tmp_path / "corpus.txt.sha256").read_text() == f"{digest}  corpus.txt\n"
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert site.requests == [None]
    assert visible(tmp_path) == {"corpus.txt", "corpus.txt.sha256"}


def test_breaks_are_resumed_where_they_happened(site, tmp_path):
    site.break_after = [1_000_000, 1_200_000]
    assert get(site, tmp_path).read_bytes() == CONTENT
    asked = [0 if header is None else int(header[6:-1]) for header in site.requests]
    assert len(asked) == 3
    assert all(a < b for a, b in pairwise(asked))
    assert visible(tmp_path) == {"corpus.txt", "corpus.txt.sha256"}


def test_a_later_call_continues(site, tmp_path):
    site.break_after = [2_500_000, 0]
    with pytest.raises(UserError, match="run the same command again") as error:
        get(site, tmp_path)
    assert str(error.value).count(". ") == 0
    assert visible(tmp_path) == {"corpus.txt.part", "corpus.txt.part.json"}
    came = (tmp_path / "corpus.txt.part").stat().st_size
    assert came > 0
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert site.requests == [None, f"bytes={came}-", f"bytes={came}-"]


def test_a_file_that_changed_in_between_comes_whole(site, tmp_path):
    site.break_after = [2_000_000, 0]
    with pytest.raises(UserError):
        get(site, tmp_path)
    newer = CONTENT[::-1]
    site.files["/some/folder/corpus.txt"], site.etag = newer, '"v2"'
    assert get(site, tmp_path).read_bytes() == newer


@pytest.mark.parametrize(("name", "value"), [("ranges", False), ("etag", None)])
def test_servers_that_cannot_resume_start_over(site, tmp_path, name, value):
    setattr(site, name, value)
    site.break_after = [2_000_000]
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert len(site.requests) == 2


@pytest.mark.parametrize(("more", "later_requests"), [(b"", []), (b"more", [None])], ids=["whole", "too long"])
def test_a_part_that_is_already_whole_is_kept_and_a_longer_one_starts_over(site, tmp_path, more, later_requests):
    (tmp_path / "corpus.txt.part").write_bytes(CONTENT + more)
    state = {"url": f"{site.address}/some/folder/corpus.txt", "validator": '"v1"'}
    (tmp_path / "corpus.txt.part.json").write_text(json.dumps(state))
    assert get(site, tmp_path).read_bytes() == CONTENT
    assert site.requests == [f"bytes={len(CONTENT + more)}-", *later_requests]


def test_wrong_pinned_checksum_keeps_nothing(site, tmp_path):
    with pytest.raises(UserError, match="checksum") as error:
        get(site, tmp_path, sha256="0" * 64)
    assert "0" * 64 in str(error.value)
    assert visible(tmp_path) == set()
    assert get(site, tmp_path, sha256=hashlib.sha256(CONTENT).hexdigest().upper()).read_bytes() == CONTENT


def test_damage_on_disk_is_repaired_and_another_content_than_the_recorded_one_refused(site, tmp_path):
    path = get(site, tmp_path)
    path.write_bytes(CONTENT[:-5])
    assert get(site, tmp_path).read_bytes() == CONTENT
    path.unlink()
    site.files["/some/folder/corpus.txt"] = b"something else"
    with pytest.raises(UserError, match=r"corpus\.txt\.sha256"):
        get(site, tmp_path)
    assert visible(tmp_path) == {"corpus.txt.sha256"}


def test_missing_file_on_the_server_and_nobody_answers(site, tmp_path):
    site.files.clear()
    with pytest.raises(UserError, match=f"404.*{site.address}/some/folder/corpus.txt"):
        get(site, tmp_path)
    with pytest.raises(UserError, match=r"Cannot download http://127\.0\.0\.1:9/some"):
        fetch(URL, tmp_path, mirror="http://127.0.0.1:9", progress=False)
    assert visible(tmp_path) == set()


def test_bad_arguments(tmp_path):
    with pytest.raises(UserError, match="mirror must be an address"):
        fetch(URL, tmp_path, mirror="hf-mirror.com")
    with pytest.raises(UserError, match="no corpus 'pile'"):
        download("pile", tmp_path)
    (tmp_path / "corpus.txt.sha256").write_text("nonsense\n")
    with pytest.raises(UserError, match="no SHA-256"):
        fetch(URL, tmp_path)
    with pytest.raises(UserError, match="Cannot write"):
        fetch(URL, tmp_path / "corpus.txt.sha256" / "below")


def test_named_corpora_come_from_the_mirror(site, tmp_path):
    for split in ("train", "valid"):
        path = f"/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{split}.txt"
        site.files[f"/prefix{path}"] = f"Story of {split}.\n<|endoftext|>\n".encode()
    mirror = f"{site.address}/prefix/"
    files = download("tinystories", tmp_path, mirror=mirror, progress=False)
    for split in ("train", "valid"):
        assert files[split].read_text() == f"Story of {split}.\n<|endoftext|>\n"
    wrong = {"TinyStoriesV2-GPT4-valid.txt": "1" * 64}
    with pytest.raises(UserError, match="checksum"):
        download("tinystories", tmp_path, mirror=mirror, sha256=wrong, progress=False)


def test_all_addresses_are_official():
    urls = [url for splits in SOURCES.values() for urls in splits.values() for url in urls]
    assert len(urls) == 7
    assert all(url.startswith("https://huggingface.co/datasets/") for url in urls)
    assert len({url.rsplit("/", 1)[-1] for url in urls}) == len(urls)


LINES = [" \n", " = First = \n", " \n", " Text with \n", " = x = \n", " in it . \n", " \n", " = = Part = = \n", " \n"]


def test_articles_are_told_from_headings_within():
    text = "".join(articles([*LINES, " \n", " = Second = \n", " \n", " End . \n"]))
    first, second, rest = text.split("<|endoftext|>\n")
    assert first == "".join(LINES) + " \n"
    assert second == " = Second = \n \n End . \n"
    assert rest == ""


def test_wikitext_comes_from_parquet(site, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is the optional part wikitext")
    from pyarrow import parquet

    # the parquet files have empty strings for blank lines
    rows = [line.strip(" \n") and line for line in LINES]
    for split in ("train", "valid"):
        for url in SOURCES["wikitext103"][split]:
            file = tmp_path / url.rsplit("/", 1)[-1]
            parquet.write_table(pyarrow.table({"text": rows}), file)
            site.files[url.removeprefix("https://huggingface.co")] = file.read_bytes()
    files = download("wikitext103", tmp_path / "downloads", mirror=site.address, progress=False)
    eot = "<|endoftext|>\n"
    assert files["valid"].read_text() == "".join([*LINES, eot])
    assert files["train"].read_text() == "".join([*LINES, " \n", eot, *LINES[1:], eot])
    before = files["train"].stat().st_mtime_ns
    assert download("wikitext103", tmp_path / "downloads", mirror=site.address, progress=False) == files
    assert files["train"].stat().st_mtime_ns == before


def test_a_parquet_file_that_is_none_and_no_pyarrow(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(UserError, match=r"pip install 'lmcore\[wikitext\]'"):
            wikitext_as_text([], tmp_path / "train.txt")
    pytest.importorskip("pyarrow", reason="pyarrow is the optional part wikitext")
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"x\.parquet is not a WikiText parquet file"):
        wikitext_as_text([tmp_path / "x.parquet"], tmp_path / "train.txt")
    assert not (tmp_path / "train.txt").exists()


def test_wikitext_articles_of_the_real_split(shared_data):
    """The validation split is known to have 60 articles."""
    path = shared_data / "wikitext103" / "valid.txt"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    with open(path, encoding="utf-8", newline="\n") as file:
        text = "".join(articles(file))
    assert text.count("<|endoftext|>\n") == 60
    assert text.replace("<|endoftext|>\n", "") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "unknown", "is_what"),
    [
        (217_646, 800, "WikiText-103's validation text"),
        (217_646, 5_900, "the validation text in WikiText-2's form, more of it <unk> than in WikiText-103's"),
        (245_569, 1_200, "WikiText-103's test text"),
        (206_454, 1_000, "another text, as long as 0.20% of WikiText-103's training text"),
    ],
)
def test_a_text_of_wikitext_is_told_by_its_words_and_unknown_ones(tmp_path, words, unknown, is_what):
    others, odd = divmod(words - 5 - 2 * unknown, 2)
    lines = [
        " \n = A = \n",
        " <unk> \n" * unknown,
        "<|endoftext|>\n",
        " a \n" * others,
        " a" * odd,
    ]  # 5, 2 each, 0, 2 each
    (tmp_path / "a.txt").write_text("".join(lines))
    found = describe_wikitext([tmp_path / "a.txt"])
    assert (found["words"], found["is"]) == (words, is_what)
    assert found["unknown"] == pytest.approx(unknown / (3 + unknown + others + odd))


def test_another_text_is_not_wikitext(tmp_path):
    (tmp_path / "story.txt").write_text("Once = there =\n was <unk>.\n<|endoftext|>\n")
    assert describe_wikitext([tmp_path / "story.txt"]) is None


@pytest.mark.parametrize(
    ("split", "words", "is_what"),
    [("valid", 217_646, "WikiText-103's validation text"), ("test", 245_569, "WikiText-103's test text")],
)
def test_words_of_the_real_texts_are_the_published_ones(shared_data, split, words, is_what):
    path = shared_data / "wikitext103" / f"{split}.txt"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    found = describe_wikitext([path])
    assert (found["words"], found["is"]) == (words, is_what)
    assert 0.007 < found["unknown"] < 0.011
