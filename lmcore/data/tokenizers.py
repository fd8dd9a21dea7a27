"""From `gpt2`, `bpe:10000` or a folder to a tokenizer; where GPT-2's files are, or are downloaded to."""

import os
from pathlib import Path

from lmcore.data.corpora import Corpus, TextCorpus
from lmcore.data.downloads import fetch
from lmcore.errors import UserError, require
from lmcore.files import temporary_folder
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer, train_bpe
from lmcore.tokenizer.files import ENCODER_FILE, MERGES_FILE, find_files

GPT2_FINGERPRINT = "bfdf7cf9b4f00a1998bdcf173f13e785683958f82a06516f77ee823d6bc0ef7f"
"""`Tokenizer.fingerprint` of GPT-2 with `<|endoftext|>` as its special token."""

BASE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
SHA256 = {
    ENCODER_FILE: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    MERGES_FILE: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def gpt2_folder() -> Path:
    """The folder that the variable LMCORE_GPT2 names, or that of the user's cache to which GPT-2's files go."""
    import pooch

    return Path(os.environ.get("LMCORE_GPT2") or f"{pooch.os_cache('lmcore')}/gpt2")


def load_gpt2(folder: str | os.PathLike | None = None) -> Tokenizer:
    """GPT-2's tokenizer (50,257 tokens, `<|endoftext|>` special).

    Reads `encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`, in `folder` or, without one, `gpt2_folder`;
    what the cache lacks is downloaded. Raises `UserError` if they are not there, or are not GPT-2's.
    """
    try:
        if folder or os.environ.get("LMCORE_GPT2"):
            encoder, merges = find_files(folder or gpt2_folder())
        else:
            encoder, merges = (fetch(BASE_URL + name, gpt2_folder(), sha256) for name, sha256 in SHA256.items())
    except UserError as error:
        remedy = f"Name a folder with {ENCODER_FILE} and {MERGES_FILE} in the variable LMCORE_GPT2."
        raise UserError(f"{error} {remedy}") from error
    tokenizer = Tokenizer.from_files(encoder, merges, [END_OF_TEXT])
    require(tokenizer.fingerprint == GPT2_FINGERPRINT, f"{encoder} and {merges} are not GPT-2's tokenizer.")
    return tokenizer


def load_tokenizer(name: str | os.PathLike) -> Tokenizer:
    """`gpt2`, GPT-2's own, or a folder with a saved tokenizer, or with files in GPT-2's format."""
    if name == "gpt2":
        return load_gpt2()
    said = f"There is no tokenizer folder {name}; name one, or use gpt2, or bpe:10000 to train one on a corpus."
    require(Path(name).is_dir(), said)
    return Tokenizer.load(name)


def tokenizer_for(specification: str | os.PathLike, corpus: Corpus, work_folder: Path | None = None) -> Tokenizer:
    """The tokenizer of `load_tokenizer`; or, with `bpe:10000`, a byte-level BPE with that many tokens.

    It is trained on the training split of `corpus`, whose text may be gathered in `work_folder` (None: the system's
    folder for temporary files).
    """
    name, _, size = str(specification).partition(":")
    if name != "bpe":
        return load_tokenizer(specification)
    known = size.isdecimal() and int(size) > 256
    require(known, f"Give bpe: and a vocabulary size above 256, such as bpe:10000, not {specification}.")
    with temporary_folder("training-text-", work_folder) as temporary:
        paths: tuple[Path, ...] = (temporary / "train.txt",)
        if isinstance(corpus, TextCorpus) and corpus.valid_files and corpus.field == "text":
            paths = corpus.train_files  # are the training split, as they are
        else:
            with open(paths[0], "wb") as file:
                file.writelines(f"{text}\n{END_OF_TEXT}\n".encode() for text in corpus.documents("train"))
        return Tokenizer(*train_bpe(paths, int(size), [END_OF_TEXT]), [END_OF_TEXT])
