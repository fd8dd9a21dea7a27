"""`lmcore data ...` and `lmcore tokenizer train`."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from lmcore.config import CorpusConfig
from lmcore.errors import require
from lmcore.files import require_exists

CORPUS_DEFAULTS = CorpusConfig()


def prepare(
    source: Annotated[str, tyro.conf.Positional],
    out: Path,
    tokenizer: str = "gpt2",
    settings: Annotated[CorpusConfig, tyro.conf.arg(name="")] = CORPUS_DEFAULTS,
) -> int:
    """Tokenize a corpus once, into a folder that `lmcore train --data` takes.

    Args:
        source: A text, a file of records (.jsonl, .parquet), a folder of them or a pattern for their paths in quotes,
            also .gz and .zst; embedded; tinystories, openwebtext or wikitext103, downloaded from their official
            addresses, or hf:OWNER/NAME, a data set of Hugging Face, or of the mirror that the variable HF_ENDPOINT
            names.
        out: Folder for the tokens.
        tokenizer: gpt2, bpe:10000 (trained here, with that many tokens), or a tokenizer's folder.
        settings: What is training and what is validation text.
    """
    from lmcore.data import prepare

    data = prepare(source, tokenizer, out, settings)
    print(f"{out}: {len(data.train):,} tokens for training, {len(data.valid):,} for validation.")
    return 0


def info(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Verify a prepared corpus and print its manifest.

    Args:
        folder: Folder that `lmcore data prepare` made.
    """
    from lmcore.data import open_data

    require_exists(folder)
    data = open_data(folder)
    found = data.manifest | {"fingerprint": data.fingerprint, "end_of_text": data.tokenizer.eot_id}
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 0


def train(texts: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path, vocab_size: int = 10_000) -> int:
    """Train a byte-level BPE on text files.

    Args:
        texts: Text files, or .jsonl and .parquet with their field text; also .gz and .zst.
        out: Folder for the vocabulary and the merges.
        vocab_size: Tokens in all, <|endoftext|> among them.
    """
    from lmcore.tokenizer import END_OF_TEXT, Tokenizer, train_bpe

    there = out.exists() and not out.is_dir()  # said now, not after the training
    require(not there, f"Cannot write {out / 'encoder.json'}: File exists; nothing was changed there.")
    tokenizer = Tokenizer(*train_bpe(texts, vocab_size, [END_OF_TEXT]), [END_OF_TEXT])
    tokenizer.save(out)
    print(f"{out}: {tokenizer.vocab_size:,} tokens.")
    return 0
