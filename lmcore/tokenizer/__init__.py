"""Byte-level byte-pair encoding from scratch, and a bridge to tiktoken for bulk encoding."""

from lmcore.tokenizer.bpe import Tokenizer
from lmcore.tokenizer.corpus import read_text
from lmcore.tokenizer.gpt2 import load_gpt2
from lmcore.tokenizer.pretokenize import END_OF_TEXT, GPT2_PATTERN, pretokens
from lmcore.tokenizer.trainer import train_bpe

__all__ = ["END_OF_TEXT", "GPT2_PATTERN", "Tokenizer", "load_gpt2", "pretokens", "read_text", "train_bpe"]
