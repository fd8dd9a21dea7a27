"""Byte-level byte-pair encoding from scratch, in reading order: `pretokenize`, `train`, `bpe`, `files`."""

from lmcore.text import END_OF_TEXT
from lmcore.tokenizer.bpe import Tokenizer
from lmcore.tokenizer.pretokenize import GPT2_PATTERN, pretokens
from lmcore.tokenizer.train import train_bpe

__all__ = ["END_OF_TEXT", "GPT2_PATTERN", "Tokenizer", "pretokens", "train_bpe"]
