"""Official corpora from their official addresses: checksummed, resumed after a break, or from a mirror."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, locked, read_json, sha256_file, write_json
from lmcore.progress import Progress
from lmcore.text import END_OF_TEXT, read_text

HUGGING_FACE = "https://huggingface.co/datasets"
WIKITEXT = f"{HUGGING_FACE}/Salesforce/wikitext/resolve/main/wikitext-103-v1"

SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    # Eldan & Li 2023, the version written by GPT-4 alone
    "tinystories": {
        split: (f"{HUGGING_FACE}/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{split}.txt",)
        for split in ("train", "valid")
    },
    # a sample of Gokaslan et al. 2019
    "openwebtext": {
        split: (f"{HUGGING_FACE}/stanford-cs336/owt-sample/resolve/main/owt_{split}.txt.gz",)
        for split in ("train", "valid")
    },
    # Merity et al. 2016, tokenized form with <unk>
    "wikitext103": {
        "train": tuple(f"{WIKITEXT}/train-0000{part}-of-00002.parquet" for part in range(2)),
        "valid": (f"{WIKITEXT}/validation-00000-of-00001.parquet",),
    },
}
"""Addresses of the named corpora, by split."""

WIKITEXT_WORDS = {"training": 103_227_021, "validation": 217_646, "test": 245_569}
"""Words of WikiText-103's texts, with each end of a line as one (Merity et al. 2016). The validation and test texts of
WikiText-2 are the same articles with as many words, of which several times as many are `<unk>`."""

WIKITEXT_UNKNOWN = 0.02
"""Share of `<unk>` above which a text is not WikiText-103's, which has 0.4 % (training) to 1.0 % (test)."""

TIMEOUT_S = (15, 60)
CHUNK_BYTES = 1 << 16
"""What a break can cost at most of what has come."""


def download(
    name: str,
    folder: str | os.PathLike = "data/downloads",
    *,
    mirror: str | None = None,
    sha256: Mapping[str, str] | None = None,
    progress: bool = True,
) -> dict[str, Path]:
    """Text files of the corpus `name` (a key of `SOURCES`) in `folder`, downloaded where missing: {split: path}.

    `mirror` replaces scheme and host of the official address (`https://hf-mirror.com`). `sha256` pins checksums by
    file name; without a pin, the checksum of the first download is kept beside the file (`<file>.sha256`) and every
    later call is held against it. Raises `UserError` in one sentence when something cannot be had or is not intact.
    """
    require(name in SOURCES, f"There is no corpus {name!r} to download; choose one of {', '.join(SOURCES)}.")
    folder = Path(folder) / name
    pins = dict(sha256 or {})

    def get(url: str) -> Path:
        return fetch(url, folder, mirror=mirror, sha256=pins.get(url.rsplit("/", 1)[-1]), progress=progress)

    files = {split: [get(url) for url in urls] for split, urls in SOURCES[name].items()}
    if name == "wikitext103":
        return {split: wikitext_as_text(paths, folder / f"{split}.txt") for split, paths in files.items()}
    return {split: paths[0] for split, paths in files.items()}


def fetch(
    url: str,
    folder: str | os.PathLike,
    *,
    mirror: str | None = None,
    sha256: str | None = None,
    progress: bool = True,
) -> Path:
    """One file of `url` in `folder`, verified; downloaded if it is missing or not intact. Arguments as `download`."""
    import pooch
    from requests.exceptions import RequestException

    path = Path(folder) / url.rsplit("/", 1)[-1]
    address = on_mirror(url, mirror)
    pooch.get_logger().setLevel("ERROR")  # what it would say is in our own sentences
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock"), "", -1):
            known = sha256.lower() if sha256 else recorded_checksum(path)
            downloader = ResumingDownloader(path.with_name(f"{path.name}.part"), progress)
            pooch.retrieve(address, known_hash=known, fname=path.name, path=path.parent, downloader=downloader)
            if known is None or sha256:
                with atomic_write(checksum_path(path), "w") as file:  # in the format of `sha256sum`
                    file.write(f"{known or sha256_file(path)}  {path.name}\n")
    except UserError:
        raise
    except RequestException as error:
        raise UserError(
            f"Cannot download {address} ({type(error).__name__}); check the connection and run the same command again "
            "(it continues where it stopped), or name another mirror."
        ) from error
    except ValueError as error:  # pooch: the checksum of what came does not match
        raise UserError(
            f"The checksum of {address} is not the expected {known}, so it was not kept; try another mirror, or delete "
            f"{checksum_path(path)} if the corpus itself has changed."
        ) from error
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error
    return path


def on_mirror(url: str, mirror: str | None) -> str:
    """`url` with scheme and host replaced by those (and the path, if any) of `mirror`."""
    if mirror is None:
        return url
    base = urlsplit(mirror)
    require(
        base.scheme in ("http", "https") and bool(base.netloc),
        f"The mirror must be an address such as https://hf-mirror.com, not {mirror!r}.",
    )
    return mirror.rstrip("/") + urlsplit(url).path


def checksum_path(path: Path) -> Path:
    """The file beside `path` that keeps its checksum."""
    return path.with_name(f"{path.name}.sha256")


def recorded_checksum(path: Path) -> str | None:
    """The checksum kept beside `path`, or None if there is none. Raises `UserError` if it is not a checksum."""
    sidecar = checksum_path(path)
    if not sidecar.is_file():
        return None
    digest = sidecar.read_text(encoding="utf-8", errors="replace").split(" ")[0].strip()
    require(
        re.fullmatch("[0-9a-f]{64}", digest) is not None,
        f"{sidecar} holds no SHA-256 checksum; delete it to record a new one.",
    )
    return digest


@dataclass
class ResumingDownloader:
    """A downloader for pooch that keeps what has come in `part` and asks only for the rest (HTTP Range, RFC 9110).

    The rest is asked for with If-Range and the validator (ETag, or date of last change) of the first answer, so that
    a file that has changed in between comes whole instead of being stitched from two versions.
    """

    part: Path
    progress: bool = True

    def __call__(self, url: str, output_file: str, pooch: object = None) -> None:
        """Downloads `url` into `output_file`; called by pooch."""
        from requests.exceptions import ChunkedEncodingError, ConnectionError, Timeout

        while True:
            before = self.size()
            try:
                self.receive(url)
                break
            except (ChunkedEncodingError, ConnectionError, Timeout):
                # a server that breaks off is asked again as long as each attempt brings something
                if self.size() <= before:
                    raise
        os.replace(self.part, output_file)
        self.state_path.unlink(missing_ok=True)

    @property
    def state_path(self) -> Path:
        """Where the address and validator of the partial file are kept."""
        return self.part.with_name(f"{self.part.name}.json")

    def size(self) -> int:
        """Bytes that have come so far."""
        return self.part.stat().st_size if self.part.exists() else 0

    def receive(self, url: str) -> None:
        """Asks once for what is missing and appends it to `part`.

        Raises an error of requests if the connection breaks, `UserError` if the server has no such file.
        """
        import requests

        headers = {"Accept-Encoding": "identity"}  # bytes as stored, so that sizes and ranges mean the file's own
        state = read_json(self.state_path) if self.state_path.exists() and self.size() else {}
        if state.get("url") == url and state.get("validator"):
            headers |= {"Range": f"bytes={self.size()}-", "If-Range": state["validator"]}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
            if response.status_code == 416:  # nothing is left to send, or the part is longer than the file
                if total_size(response.headers) != self.size():
                    self.part.unlink()
                    self.receive(url)
                return
            require(
                response.status_code in (200, 206),
                f"The server answers {response.status_code} ({response.reason}) for {url}; check the address, or name "
                "another mirror.",
            )
            resumed = response.status_code == 206
            if not resumed:
                write_json(self.state_path, {"url": url, "validator": validator(response.headers)})
            total = total_size(response.headers)
            self.append(response.iter_content(CHUNK_BYTES), "ab" if resumed else "wb", total)
            if total is not None and self.size() != total:  # urllib3 before version 2 does not raise by itself
                raise requests.exceptions.ConnectionError(f"{self.size()} of {total} bytes came")

    def append(self, chunks: Iterator[bytes], mode: str, total: int | None) -> None:
        """Writes the chunks as they come, showing progress."""
        done = self.size() if mode == "ab" else 0
        bar = Progress(total, f"download {self.part.stem}", "byte", done) if self.progress and total else None
        with open(self.part, mode) as file, closing(bar) if bar else nullcontext():
            for chunk in chunks:
                file.write(chunk)
                done += len(chunk)
                if bar is not None:
                    bar.update(done)


def validator(headers: Mapping[str, str]) -> str | None:
    """What If-Range may hold: a strong ETag, else the date of last change, else None."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def total_size(headers: Mapping[str, str]) -> int | None:
    """Size of the whole file by the headers of a full, partial or unsatisfiable answer."""
    if "Content-Range" in headers:
        total = headers["Content-Range"].rpartition("/")[2]
        return int(total) if total.isdigit() else None
    return int(headers["Content-Length"]) if "Content-Length" in headers else None


ARTICLE = re.compile(r" = [^=].* = \n")


def wikitext_as_text(paths: list[Path], output: Path) -> Path:
    """WikiText's parquet files as one text with `<|endoftext|>` after each article; reused if it is newer.

    Needs pyarrow, the optional part `wikitext`; raises `UserError` without it.
    """
    if output.exists() and all(output.stat().st_mtime_ns > path.stat().st_mtime_ns for path in paths):
        return output
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(
            "WikiText-103 comes as parquet files, which need pyarrow: install it with pip install 'lmcore[wikitext]'."
        ) from None

    def lines() -> Iterator[str]:
        for path in paths:
            try:
                for batch in parquet.ParquetFile(path).iter_batches(columns=["text"]):
                    # the parquet form has empty strings for the blank lines of the original
                    yield from (line or " \n" for line in batch.column(0).to_pylist())
            except (ArrowException, OSError) as error:
                raise UserError(f"{path} is not a WikiText parquet file ({error}); delete it and run again.") from error

    with atomic_write(output) as file:
        for line in articles(lines()):
            file.write(line.encode())
    return output


def articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines with a line `<|endoftext|>` before each heading of an article but the first, and at the end."""
    first = True
    before, line = "", ""
    for after in chain(lines, [""]):
        # a heading stands alone between blank lines; " = x = " also occurs within tables and text
        if ARTICLE.fullmatch(line) and not before.strip() and not after.strip():
            if not first:
                yield f"{END_OF_TEXT}\n"
            first = False
        yield line
        before, line = line, after
    yield f"{END_OF_TEXT}\n"


def describe_wikitext(paths: Iterable[Path]) -> dict[str, Any] | None:
    """Words (with ends of lines), share of `<unk>`, and what the text of the files is; None if it is not WikiText's.

    Lines of `<|endoftext|>` do not count. The share is that of the words alone, without ends of lines.
    """
    words = lines = unknown = 0
    for path in paths:
        heading, rest = False, ""
        for chunk in read_text(path):
            text, end, rest = (rest + chunk).rpartition("\n")
            text = (text + end).replace(f"{END_OF_TEXT}\n", "")
            heading = heading or ARTICLE.match(" " + text.lstrip()) is not None
            if not heading:
                return None
            found = text.split()
            words, lines, unknown = words + len(found), lines + text.count("\n"), unknown + found.count("<unk>")
        words += len(rest.replace(END_OF_TEXT, "").split())
    counted, share = words + lines, unknown / max(words, 1)
    name = {count: name for name, count in WIKITEXT_WORDS.items()}.get(counted)
    if name is None:
        what = f"another text, as long as {counted / WIKITEXT_WORDS['training']:.2%} of WikiText-103's training text"
    elif share > WIKITEXT_UNKNOWN:
        what = f"the {name} text in WikiText-2's form, more of it <unk> than in WikiText-103's"
    else:
        what = f"WikiText-103's {name} text"
    return {"words": counted, "unknown": share, "is": what}
