"""From `gpt2`, `bpe:10000` or a folder to a tokenizer; where GPT-2's files are found, or downloaded from."""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from lmcore.data.corpora import Corpus, TextCorpus, open_corpus
from lmcore.errors import UserError, require
from lmcore.files import sha256_file, temporary_folder
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer, train_bpe
from lmcore.tokenizer.files import ENCODER_FILE, MERGES_FILE, find_files

GPT2_FINGERPRINT = "bfdf7cf9b4f00a1998bdcf173f13e785683958f82a06516f77ee823d6bc0ef7f"
"""`Tokenizer.fingerprint` of GPT-2 with <|endoftext|> as its special token."""

BASE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
"""Where tiktoken fetches GPT-2's files, and the name under which it caches them."""

SHA256 = {
    ENCODER_FILE: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    MERGES_FILE: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FOLDER_VARIABLE = "LMCORE_GPT2"
DEFAULT_FOLDER = Path("data/gpt2")
DOWNLOAD_TIMEOUT = 15
"""Seconds without an answer after which a download is given up."""


def load_gpt2(folder: str | os.PathLike | None = None, *, download: bool = True) -> Tokenizer:
    """GPT-2's tokenizer (50,257 tokens, <|endoftext|> special).

    Looks for `encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`, in `folder`; without one in the folder
    that the variable LMCORE_GPT2 names, in `data/gpt2`, and in tiktoken's cache, into which it downloads them at last,
    unless `download` is false. Raises `UserError` if they are nowhere, or are not GPT-2's.
    """
    encoder, merges = _find(folder, download)
    tokenizer = Tokenizer.from_files(encoder, merges, [END_OF_TEXT])
    require(
        tokenizer.fingerprint == GPT2_FINGERPRINT,
        f"{encoder} and {merges} are not GPT-2's tokenizer; load another tokenizer with Tokenizer.from_files.",
    )
    return tokenizer


def _find(folder: str | os.PathLike | None, download: bool) -> tuple[Path, Path]:
    if named := folder or os.environ.get(FOLDER_VARIABLE):
        return find_files(named)
    with suppress(UserError):
        return find_files(DEFAULT_FOLDER)
    return _cached(ENCODER_FILE, download), _cached(MERGES_FILE, download)


def _cached(name: str, download: bool) -> Path:
    """The file in tiktoken's cache, downloaded to there if need be, checked by its SHA-256."""
    import pooch

    # the same variables, folder and names as in tiktoken.load, so that both use one copy
    variables = (os.environ.get(variable) for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"))
    folder = next(filter(None, variables), None) or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    url = BASE_URL + name
    remedy = (
        f"put {ENCODER_FILE} and {MERGES_FILE} into {DEFAULT_FOLDER} or name their folder in the environment variable "
        f"{FOLDER_VARIABLE}."
    )
    cached = Path(folder) / hashlib.sha1(url.encode()).hexdigest()
    present = cached.is_file() and sha256_file(cached) == SHA256[name]
    require(download or present, f"GPT-2's {name} is not on this machine; {remedy}")
    try:
        path = pooch.retrieve(
            url,
            known_hash=f"sha256:{SHA256[name]}",
            fname=cached.name,
            path=folder,
            downloader=pooch.HTTPDownloader(timeout=DOWNLOAD_TIMEOUT),
        )
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        raise UserError(
            f"GPT-2's {name} is not on this machine and could not be downloaded from {url} "
            f"({type(error).__name__}); {remedy}"
        ) from error
    return Path(path)


def describe_tokenizer(tokenizer: Tokenizer | str | os.PathLike) -> str:
    """What makes two tokenizers the same before one of them is trained or downloaded."""
    if isinstance(tokenizer, str | os.PathLike):
        if is_specification(tokenizer):
            return str(tokenizer)
        tokenizer = load_tokenizer(Path(tokenizer))
    return tokenizer.fingerprint


def is_specification(tokenizer: str | os.PathLike) -> bool:
    """Whether this is `gpt2` or `bpe:…` and not a folder."""
    return isinstance(tokenizer, str) and (tokenizer == "gpt2" or tokenizer.startswith("bpe:"))


def tokenizer_for(
    specification: str | os.PathLike,
    source: Corpus | str | os.PathLike,
    *,
    work_folder: str | os.PathLike | None = None,
) -> Tokenizer:
    """The tokenizer that `specification` names.

    `gpt2`: GPT-2's own. `bpe:10000`: a byte-level BPE with that many tokens, trained on the training split of
    `source`, whose text may be gathered in `work_folder` (None: the system's folder for temporary files). Anything
    else: a folder with a saved tokenizer, or with files in GPT-2's format, `encoder.json` and `vocab.bpe` or
    `vocab.json` and `merges.txt`.
    """
    if not is_specification(specification):
        return load_tokenizer(Path(specification))
    if specification == "gpt2":
        return load_gpt2()
    size = specification.removeprefix("bpe:")
    require(
        size.isdecimal() and int(size) > 256,
        f"A tokenizer to be trained is bpe: and its vocabulary size above 256, such as bpe:10000, not {specification}.",
    )
    corpus = open_corpus(source) if isinstance(source, str | os.PathLike) else source
    if isinstance(corpus, TextCorpus) and corpus.valid_files:  # the files are the training split, as they are
        return Tokenizer(*train_bpe(corpus.train_files + corpus.extra_train, int(size), [END_OF_TEXT]), [END_OF_TEXT])
    with temporary_folder("training-text-", work_folder) as temporary:
        path = temporary / "train.txt"
        with open(path, "wb") as file:
            for piece in corpus.documents("train"):
                file.write(piece.text.encode())
                if piece.ends_document:
                    file.write(f"\n{END_OF_TEXT}\n".encode())
        return Tokenizer(*train_bpe(path, int(size), [END_OF_TEXT]), [END_OF_TEXT])


def load_tokenizer(folder: Path) -> Tokenizer:
    """A saved tokenizer, or GPT-2's from its two files."""
    require(
        folder.is_dir(), f"There is no tokenizer folder {folder}; name one, or use gpt2, or bpe:10000 to train one."
    )
    return Tokenizer.load(folder)
