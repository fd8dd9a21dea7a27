"""From `gpt2`, `bpe:10000` or a folder to a tokenizer."""

import os
import tempfile
from pathlib import Path

from lmcore.data.corpora import Corpus, TextCorpus, open_corpus
from lmcore.data.gpt2 import load_gpt2
from lmcore.errors import require
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import Tokenizer, train_bpe


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
    else: a folder with a saved tokenizer, or with GPT-2's `vocab.bpe` and `encoder.json`.
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
    with tempfile.TemporaryDirectory(prefix="training-text-", dir=work_folder) as temporary:
        path = Path(temporary) / "train.txt"
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
