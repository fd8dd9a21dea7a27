"""The tokenizer: text to token ids and back."""

import hashlib
import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.errors import UserError, require
from lmcore.files import read_json, write_json
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import bridge, gpt2_format
from lmcore.tokenizer.corpus import available_cores
from lmcore.tokenizer.pretokenize import (
    check_special_tokens,
    pretokens,
    safe_pieces,
    special_pattern,
)

if TYPE_CHECKING:
    import tiktoken

SPECIAL_TOKENS_FILE = "special_tokens.json"
CACHED_PRETOKENS = 1 << 14
"""Encoded pretokens that are kept, to bound memory: a few MiB, and most of the words of natural text."""

PIECE_CHARACTERS = 1 << 14
"""Characters that `encode_iterable` holds at a time, unless one pretoken is longer."""


class Tokenizer:
    """Byte-level byte-pair encoding with GPT-2's pretokens.

    vocab: id -> bytes, the ids from 0 on. merges: pairs of tokens in the order in which they are applied.
    special_tokens: strings encoded as one id wherever they occur in text, the longest first where they overlap; those
    that the vocabulary lacks are given the next free ids.

    Raises `UserError` if vocabulary, merges and special tokens do not fit together.
    """

    def __init__(
        self,
        vocab: dict[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = None,
    ):
        self.vocab = dict(vocab)
        self.merges = [(left, right) for left, right in merges]
        self.special_tokens = check_special_tokens(special_tokens)
        require(bool(self.vocab), "The vocabulary is empty; give id -> bytes.")
        for token_id, token in self.vocab.items():
            require(
                isinstance(token_id, int) and token_id >= 0 and isinstance(token, bytes) and token != b"",
                f"The vocabulary must map ids from 0 on to non-empty bytes, not {token_id!r} to {token!r}.",
            )
        self._ids = {token: token_id for token_id, token in self.vocab.items()}
        require(len(self._ids) == len(self.vocab), "The vocabulary holds the same bytes under several ids.")
        for token in self.special_tokens:
            if token.encode() not in self._ids:
                new = max(self.vocab) + 1
                self.vocab[new], self._ids[token.encode()] = token.encode(), new
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right) in enumerate(self.merges):
            require(
                left in self._ids and right in self._ids and left + right in self._ids,
                f"Merge {rank} ({left!r}, {right!r}) has a part or a result that is not in the vocabulary.",
            )
            self._merges.setdefault((self._ids[left], self._ids[right]), (rank, self._ids[left + right]))
        self._special_ids = {token: self._ids[token.encode()] for token in self.special_tokens}
        self._special_pattern = special_pattern(self.special_tokens)
        self._cache: dict[str, list[int]] = {}

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, special_tokens={self.special_tokens})"

    @classmethod
    def from_files(
        cls,
        vocab_path: str | os.PathLike,
        merges_path: str | os.PathLike,
        special_tokens: Sequence[str] | None = None,
    ) -> "Tokenizer":
        """Reads files in GPT-2's format (`encoder.json` and `vocab.bpe`), which `save` writes too."""
        return cls(gpt2_format.read_vocab(vocab_path), gpt2_format.read_merges(merges_path), special_tokens)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `encoder.json`, `vocab.bpe` (GPT-2's format) and `special_tokens.json` into `folder`."""
        gpt2_format.write_files(folder, self.vocab, self.merges)
        write_json(Path(folder) / SPECIAL_TOKENS_FILE, self.special_tokens)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Tokenizer":
        """Reads what `save` wrote. Without `special_tokens.json`, <|endoftext|> is special if the vocabulary has it."""
        folder = Path(folder)
        tokenizer = cls.from_files(folder / gpt2_format.ENCODER_FILE, folder / gpt2_format.MERGES_FILE)
        if (folder / SPECIAL_TOKENS_FILE).exists():
            special_tokens = read_json(folder / SPECIAL_TOKENS_FILE)
            require(isinstance(special_tokens, list), f"{folder / SPECIAL_TOKENS_FILE} must be a JSON list of strings.")
        else:
            special_tokens = [END_OF_TEXT] if END_OF_TEXT.encode() in tokenizer._ids else []
        return cls(tokenizer.vocab, tokenizer.merges, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding of these tokens needs: the largest id and one."""
        return max(self.vocab) + 1

    @property
    def eot_id(self) -> int:
        """Id of <|endoftext|>. Raises `UserError` if the vocabulary has none."""
        require(END_OF_TEXT.encode() in self._ids, f"This tokenizer has no token {END_OF_TEXT}.")
        return self._ids[END_OF_TEXT.encode()]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that decides the ids: vocabulary, merges and special tokens."""
        digest = hashlib.sha256()
        for token_id in sorted(self.vocab):
            digest.update(f"{token_id} {self.vocab[token_id].hex()}\n".encode())
        for left, right in self.merges:
            digest.update(f"{left.hex()}+{right.hex()}\n".encode())
        for token in sorted(self.special_tokens):
            digest.update(f"special {token.encode().hex()}\n".encode())
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens in it become their own ids. Lone surrogates are read as U+FFFD."""
        if not text.isascii():
            text = _without_surrogates(text)
        ids: list[int] = []
        for place, part in enumerate(self._special_pattern.split(text) if self._special_pattern else [text]):
            if place % 2:
                ids.append(self._special_ids[part])
                continue
            for pretoken in pretokens(part):
                ids += self._cache.get(pretoken) or self._encode_pretoken(pretoken)
        return ids

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Yields the ids of the text that the strings of `iterable` make up, such as the lines of an open file.

        The same ids as `encode` of the joined text, wherever it is cut, in memory that does not grow with it.
        """
        for piece in safe_pieces(iterable, self.special_tokens, PIECE_CHARACTERS):
            yield from self.encode(piece)

    def encode_documents(self, documents: Iterable[str]) -> list[list[int]]:
        """The ids of each document, by tiktoken, on all cores. Special tokens in the text are read as plain text.

        Raises `UserError` where `to_tiktoken` does.
        """
        return self._tiktoken.encode_ordinary_batch(list(documents), num_threads=available_cores())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids (a list, array or tensor of one dimension). Raises `UserError` on an unknown id."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        try:
            return b"".join([self.vocab[token_id] for token_id in ids])
        except KeyError as error:
            raise UserError(
                f"{error.args[0]} is not a token id of this tokenizer, whose ids are 0 to {self.vocab_size - 1}."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Raises `UserError` on an unknown id."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_tiktoken(self) -> "tiktoken.Encoding":
        """The same tokenizer as a `tiktoken.Encoding`, with the same ids.

        Raises `UserError` if tiktoken cannot express it: it needs all 256 bytes, ids of merged tokens that rise in
        the order of the merges, and no pair of tokens that make up a third one without being its merge.
        """
        return self._tiktoken

    @classmethod
    def from_tiktoken(cls, encoding: "tiktoken.Encoding") -> "Tokenizer":
        """The tokenizer of a `tiktoken.Encoding` with GPT-2's pretoken pattern; `UserError` for other patterns."""
        vocab, merges, special_tokens = bridge.from_encoding(encoding)
        return cls(vocab, merges, special_tokens)

    @cached_property
    def _tiktoken(self) -> "tiktoken.Encoding":
        return bridge.to_encoding(f"lmcore-{self.fingerprint[:16]}", self.vocab, self.merges, self._special_ids)

    def _encode_pretoken(self, pretoken: str) -> list[int]:
        try:
            ids = merge_ids([self._ids[bytes([byte])] for byte in pretoken.encode()], self._merges)
        except KeyError as error:
            raise UserError(f"The vocabulary lacks the byte {error.args[0]!r} of {pretoken!r}.") from None
        if len(self._cache) >= CACHED_PRETOKENS:
            self._cache.clear()
        self._cache[pretoken] = ids
        return ids


def merge_ids(ids: list[int], merges: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """Applies to `ids` always the merge of lowest rank that is there, leftmost first, until there is none.

    merges: pair of ids -> (rank, id of the merged token). A linked list and a heap: n log n, so that a pretoken of a
    million letters ends, too.
    """
    following = list(range(1, len(ids) + 1))
    preceding = list(range(-1, len(ids) - 1))
    heap = [(*merges[pair], at) for at, pair in enumerate(pairwise(ids)) if pair in merges]
    heapq.heapify(heap)
    end, gone = len(ids), -1
    while heap:
        rank, new, at = heapq.heappop(heap)
        after = following[at]
        # an entry is outdated if one of its two tokens has been merged since
        if after == end or merges.get((ids[at], ids[after])) != (rank, new):
            continue
        ids[at], ids[after] = new, gone
        following[at] = after = following[after]
        if after != end:
            preceding[after] = at
            if (ids[at], ids[after]) in merges:
                heapq.heappush(heap, (*merges[ids[at], ids[after]], at))
        before = preceding[at]
        if before >= 0 and (ids[before], ids[at]) in merges:
            heapq.heappush(heap, (*merges[ids[before], ids[at]], before))
    return [token_id for token_id in ids if token_id != gone]


def _without_surrogates(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates by U+FFFD, as tiktoken does."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
