"""Official corpora from their official addresses, and WikiText-103 as text."""

import os
import re
from pathlib import Path

from lmcore.errors import UserError, require, why_not_written
from lmcore.files import atomic_write, read_json
from lmcore.text import END_OF_TEXT, ENDING, read_text

HUGGING_FACE = "https://huggingface.co"
DATASETS = f"{HUGGING_FACE}/datasets"
WIKITEXT = f"{DATASETS}/Salesforce/wikitext/resolve/main/wikitext-103-v1"

SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    # Eldan & Li 2023, the version written by GPT-4 alone
    "tinystories": {
        split: (f"{DATASETS}/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-{split}.txt",)
        for split in ("train", "valid")
    },
    # a sample of Gokaslan et al. 2019
    "openwebtext": {
        split: (f"{DATASETS}/stanford-cs336/owt-sample/resolve/main/owt_{split}.txt.gz",)
        for split in ("train", "valid")
    },
    # Merity et al. 2016, tokenized form with <unk>
    "wikitext103": {
        "train": tuple(f"{WIKITEXT}/train-0000{part}-of-00002.parquet" for part in range(2)),
        "valid": (f"{WIKITEXT}/validation-00000-of-00001.parquet",),
    },
}
"""Addresses of the named corpora, by split."""

HUB = "hf:"
"""What the name of a data set of Hugging Face begins with here."""

TIMEOUT_S = 60


def download(name: str, folder: str | os.PathLike, *, progress: bool = True) -> dict[str, Path]:
    """Text files of the corpus `name` (a key of `SOURCES`) in `folder`, downloaded where missing: {split: path}.

    Raises `UserError` if a file cannot be downloaded or written.
    """
    folder, texts = Path(folder) / name, {}
    for split, urls in SOURCES[name].items():
        paths = [fetch(url, folder, progress=progress) for url in urls]
        texts[split] = wikitext_as_text(paths, folder / f"{split}.txt") if name == "wikitext103" else paths[0]
    return texts


def download_parquet(source: str, folder: str | os.PathLike, *, progress: bool = True) -> dict[str, tuple[Path, ...]]:
    """The Parquet files of `hf:OWNER/NAME`, or of its part `hf:OWNER/NAME/PART`, for training and validation.

    Hugging Face lists them for every data set that it can show. Raises `UserError` if it does not, or of several parts
    none is named.
    """
    words = source.removeprefix(HUB).split("/")
    require(len(words) in (2, 3), f"{source} must be {HUB}OWNER/NAME, or {HUB}OWNER/NAME/PART.")
    folder = Path(folder, "--".join(words[:2]))
    listed = read_json(fetch(f"{HUGGING_FACE}/api/datasets/{words[0]}/{words[1]}/parquet", folder, progress=False))
    part = words[2] if len(words) == 3 else next(iter(listed)) if len(listed) == 1 else ""
    several = f"{HUB}{'/'.join(words[:2])} has the parts {', '.join(listed)}; name one, after another /."
    require(part in listed, several)
    splits = {"train": listed[part].get("train", []), "valid": listed[part].get("validation", [])}
    require(bool(splits["train"]), f"{source} has no split train, but {', '.join(listed[part])}.")
    return {
        split: tuple(fetch(url, folder / part / split, progress=progress) for url in urls)
        for split, urls in splits.items()
    }


def fetch(url: str, folder: Path, sha256: str | None = None, *, progress: bool = True) -> Path:
    """The file of `url` in `folder`, downloaded unless it is there (with the checksum `sha256`, if one is known).

    The variable HF_ENDPOINT names a mirror of Hugging Face, as for its own library. Raises `UserError`.
    """
    import pooch

    address = url.replace(HUGGING_FACE, os.environ.get("HF_ENDPOINT", HUGGING_FACE).rstrip("/"))
    pooch.get_logger().setLevel("ERROR")
    downloader = pooch.HTTPDownloader(progressbar=progress, timeout=TIMEOUT_S)
    try:
        name = url.rpartition("/")[2]
        return Path(pooch.retrieve(address, known_hash=sha256, fname=name, path=folder, downloader=downloader))
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        why = f"Cannot download {address} to {folder} ({why_not_written(error)})"
        raise UserError(f"{why}; check connection and disk, or name a mirror in HF_ENDPOINT.") from error


def wikitext_as_text(paths: list[Path], output: Path) -> Path:
    """WikiText's parquet files as one text with `<|endoftext|>` after each article; reused if it is there.

    Raises `UserError` without pyarrow, and for a file that is not parquet.
    """
    if output.exists():
        return output
    lines = [text.removesuffix(ENDING) for path in paths for text in read_text(path)]
    with atomic_write(output) as file:  # the parquet form has empty strings for the blank lines of the original
        file.write(end_articles("".join([line or " \n" for line in lines]).encode()))
    return output


LAST_LINE = re.compile(rb"\n \n(?= = [^=\n][^\n]* = \n \n)")
"""The blank line before the title of an article, which stands alone between blank lines."""


def end_articles(text: bytes) -> bytes:
    """WikiText with a line `<|endoftext|>` behind each article."""
    end = f"{END_OF_TEXT}\n".encode()
    return LAST_LINE.sub(b"\n \n" + end, text) + end
