"""Byte-level byte-pair encoding from scratch, and a bridge to tiktoken for bulk encoding."""

from lmcore.text import END_OF_TEXT
from lmcore.tokenizer.bpe import Tokenizer
from lmcore.tokenizer.gpt2 import load_gpt2
from lmcore.tokenizer.pretokenize import GPT2_PATTERN, pretokens
from lmcore.tokenizer.trainer import train_bpe

__all__ = ["END_OF_TEXT", "GPT2_PATTERN", "Tokenizer", "load_gpt2", "pretokens", "train_bpe"]
