"""From `gpt2`, `bpe:10000` or a folder to a tokenizer; where GPT-2's files are found, or downloaded to."""

import os
from contextlib import suppress
from pathlib import Path

from lmcore.data.corpora import Corpus, TextCorpus, open_corpus
from lmcore.data.downloads import fetch
from lmcore.errors import UserError, require
from lmcore.files import temporary_folder
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer, train_bpe
from lmcore.tokenizer.files import ENCODER_FILE, MERGES_FILE, find_files

GPT2_FINGERPRINT = "bfdf7cf9b4f00a1998bdcf173f13e785683958f82a06516f77ee823d6bc0ef7f"
"""`Tokenizer.fingerprint` of GPT-2 with <|endoftext|> as its special token."""

BASE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
SHA256 = {
    ENCODER_FILE: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    MERGES_FILE: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FOLDER_VARIABLE = "LMCORE_GPT2"
DEFAULT_FOLDER = Path("data/gpt2")


def load_gpt2(folder: str | os.PathLike | None = None, *, download: bool = True) -> Tokenizer:
    """GPT-2's tokenizer (50,257 tokens, <|endoftext|> special).

    Looks for `encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`, in `folder`; without one in the folder
    that the variable LMCORE_GPT2 names, in `data/gpt2`, and in the user's cache, into which it downloads them at last,
    unless `download` is false. Raises `UserError` if they are nowhere, or are not GPT-2's.
    """
    named = folder or os.environ.get(FOLDER_VARIABLE)
    encoder, merges = find_files(named) if named else _find(download)
    tokenizer = Tokenizer.from_files(encoder, merges, [END_OF_TEXT])
    require(
        tokenizer.fingerprint == GPT2_FINGERPRINT,
        f"{encoder} and {merges} are not GPT-2's tokenizer; load another tokenizer with Tokenizer.from_files.",
    )
    return tokenizer


def _find(download: bool) -> tuple[Path, Path]:
    import pooch

    cache = Path(pooch.os_cache("lmcore")) / "gpt2"
    for place in (DEFAULT_FOLDER, cache):
        with suppress(UserError):
            return find_files(place)
    try:
        require(download, "GPT-2's tokenizer is not on this machine.")
        encoder, merges = (fetch(BASE_URL + name, cache, sha256=sha256) for name, sha256 in SHA256.items())
    except UserError as error:
        remedy = f"Put {ENCODER_FILE} and {MERGES_FILE} into {DEFAULT_FOLDER}, or name their folder in the variable"
        raise UserError(f"{error} {remedy} {FOLDER_VARIABLE}.") from error
    return encoder, merges


def describe_tokenizer(tokenizer: Tokenizer | str | os.PathLike) -> str:
    """What makes two tokenizers the same before one of them is trained or downloaded."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.fingerprint
    return str(tokenizer) if is_specification(tokenizer) else tokenizer_for(tokenizer, "embedded").fingerprint


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
    else: a folder with a saved tokenizer, or with files in GPT-2's format.
    """
    if not is_specification(specification):
        said = f"There is no tokenizer folder {specification}; name one, or use gpt2, or bpe:10000 to train one."
        require(Path(specification).is_dir(), said)
        return Tokenizer.load(specification)
    if specification == "gpt2":
        return load_gpt2()
    size = str(specification).removeprefix("bpe:")
    require(
        size.isdecimal() and int(size) > 256,
        f"A tokenizer to be trained is bpe: and its vocabulary size above 256, such as bpe:10000, not {specification}.",
    )
    corpus = open_corpus(source) if isinstance(source, str | os.PathLike) else source
    with temporary_folder("training-text-", work_folder) as temporary:
        paths: tuple[Path, ...] = (temporary / "train.txt",)
        if isinstance(corpus, TextCorpus) and corpus.valid_files:
            paths = corpus.train_files  # are the training split, as they are
        else:
            with open(paths[0], "wb") as file:
                file.writelines(f"{text}\n{END_OF_TEXT}\n".encode() for text in corpus.documents("train"))
        return Tokenizer(*train_bpe(paths, int(size), [END_OF_TEXT]), [END_OF_TEXT])
