"""The tokenizer: text to token ids and back."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.errors import UserError, require
from lmcore.files import not_a_pipe, read_json, write_json
from lmcore.text import END_OF_TEXT
from lmcore.tokenizer import files, hugging_face, pretokenize
from lmcore.tokenizer.pretokenize import GPT2_PATTERN, chunks, pretokens
from lmcore.tokenizer.train import available_cores

if TYPE_CHECKING:
    import tiktoken

SPECIAL_TOKENS_FILE = "special_tokens.json"
PIECE_CHARACTERS = 1 << 14
"""Characters that `encode_iterable` holds at a time, unless one pretoken is longer."""

CACHED_CHUNKS = 1 << 16
"""Chunks and pretokens whose ids are kept, to bound memory: some 15 MB, and the words of a MB of web text."""

LONGEST_SPACE = 500_000
RUN_OF_SPACE = re.compile(rf"\s{{{LONGEST_SPACE}}}")
"""What tiktoken's pattern engine may not be able to match (0.14 panics at a run of a million)."""


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced, as tiktoken does."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def merge_ids(ids: Sequence, ranks: dict[tuple, int], merged: Sequence) -> list:
    """Applies to `ids` always the merge of lowest rank that is there, leftmost first, until there is none.

    ranks: pair of ids -> rank of its merge. merged: id of the merged token by rank. A heap holds the merges by rank and
    place, so n ids take a time of order n log n.
    """
    parts = [*ids, None]  # a merged token stays in the left place and leaves None in the right one; one None behind all
    before, after = list(range(-1, len(parts))), list(range(1, len(parts) + 1))  # the neighbors that are left
    heap = [(ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks]
    heapify(heap)
    while heap:
        rank, place = heappop(heap)
        right = after[place]
        if ranks.get((parts[place], parts[right])) != rank:  # one of the two has been merged with another
            continue
        parts[place], parts[right] = merged[rank], None
        after[place] = after[right]
        before[after[place]] = place
        for left, right in ((before[place], place), (place, after[place])):
            if (pair := (parts[left], parts[right])) in ranks:
                heappush(heap, (ranks[pair], left))
    return [part for part in parts if part is not None]


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[bytes, ...]]:
    """The merges behind tiktoken's ranks, in their order.

    A token's merge is found by encoding its bytes with the merges before it. If that leaves more than two parts, no
    merge makes the token, and those parts are given.
    """
    tokens = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges: dict[tuple[bytes, ...], int] = {}
    for rank, token in enumerate(tokens):
        merges[tuple(merge_ids([bytes([byte]) for byte in token], merges, tokens))] = rank
    return list(merges)


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
        self.special_tokens = pretokenize.check_special_tokens(special_tokens)
        require(bool(self.vocab), "The vocabulary is empty; give id -> bytes.")
        for token_id, token in self.vocab.items():
            require(
                isinstance(token_id, int) and token_id >= 0 and isinstance(token, bytes) and token != b"",
                f"The vocabulary must map ids from 0 on to non-empty bytes, not {token_id!r} to {token!r}.",
            )
        self._ids = {token: token_id for token_id, token in self.vocab.items()}
        require(len(self._ids) == len(self.vocab), "The vocabulary holds the same bytes under several ids.")
        for special in self.special_tokens:
            if special.encode() not in self._ids:
                new = max(self.vocab) + 1
                self.vocab[new], self._ids[special.encode()] = special.encode(), new
        self.special_ids = {token: self._ids[token.encode()] for token in self.special_tokens}
        """Id of each special token."""
        self._special_pattern = pretokenize.special_pattern(self.special_tokens)
        self._ranks: dict[tuple[int, int], int] = {}
        for rank, (left, right) in enumerate(self.merges):
            require(
                left in self._ids and right in self._ids and left + right in self._ids,
                f"Merge {rank} ({left!r}, {right!r}) has a part or a result that is not in the vocabulary.",
            )
            self._ranks.setdefault((self._ids[left], self._ids[right]), rank)
        self._merged = [self._ids[left + right] for left, right in self.merges]
        self._byte_ids = {token[0]: token_id for token, token_id in self._ids.items() if len(token) == 1}
        self._cache: dict[str, list[int]] = {}

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, special_tokens={self.special_tokens})"

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding of these tokens needs: the largest id and one."""
        return max(self.vocab) + 1

    @property
    def eot_id(self) -> int:
        """Id of `<|endoftext|>`. Raises `UserError` if the vocabulary has none."""
        require(END_OF_TEXT.encode() in self._ids, f"This tokenizer has no token {END_OF_TEXT}.")
        return self._ids[END_OF_TEXT.encode()]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that decides the ids: vocabulary, merges and special tokens."""
        lines = [f"{token_id} {self.vocab[token_id].hex()}\n" for token_id in sorted(self.vocab)]
        lines += [f"{left.hex()}+{right.hex()}\n" for left, right in self.merges]
        lines += [f"special {token.encode().hex()}\n" for token in sorted(self.special_tokens)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens in it become their own ids. Lone surrogates are read as U+FFFD.

        Merges in Python, one pretoken at a time; the ids of chunks seen before are looked up.
        """
        text, ids = well_formed(text), []
        for place, part in enumerate(self._special_pattern.split(text) if self._special_pattern else [text]):
            if place % 2:
                ids.append(self.special_ids[part])
                continue
            for chunk in chunks(part):
                ids += self._cache.get(chunk) or self._encode_chunk(chunk)
        return ids

    def _encode_chunk(self, chunk: str) -> list[int]:
        """The ids of a chunk, which are kept, as are those of its pretokens."""
        words = pretokens(chunk)
        if len(words) > 1:
            ids = [token_id for word in words for token_id in self._cache.get(word) or self._encode_chunk(word)]
        else:
            try:
                ids = merge_ids([self._byte_ids[byte] for byte in chunk.encode()], self._ranks, self._merged)
            except KeyError as error:
                raise UserError(f"The vocabulary lacks the byte {bytes(error.args)!r} of {chunk!r}.") from None
        if len(self._cache) >= CACHED_CHUNKS:
            self._cache.clear()
        self._cache[chunk] = ids
        return ids

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Yields the ids of the text that the strings of `iterable` make up, such as the lines of an open file.

        The same ids as `encode` of the joined text, wherever it is cut, in memory that does not grow with it.
        """
        for piece in pretokenize.safe_pieces(iterable, self.special_tokens, PIECE_CHARACTERS):
            yield from self.encode(piece)

    def encode_documents(self, documents: Iterable[str]) -> list[list[int]]:
        """The ids of each document, on all cores. Special tokens in the text are read as plain text.

        By gigatoken (the extra `fast-tokenizer`) where it is installed, else by tiktoken; the ids are the same. Raises
        `UserError` where `tiktoken` does, and for a text with a `RUN_OF_SPACE`.
        """
        documents = list(documents)
        for text in documents:
            endless = len(text) >= LONGEST_SPACE and RUN_OF_SPACE.search(text)
            require(not endless, f"A text has a run of more than {LONGEST_SPACE:,} white-space characters; shorten it.")
        encoding = self.tiktoken  # first of all, so that what is refused does not depend on what is installed
        if self.gigatoken is None:
            return encoding.encode_ordinary_batch(documents, num_threads=available_cores())
        return self.gigatoken.encode_batch_list([well_formed(text) for text in documents])

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

    @classmethod
    def from_files(
        cls, vocab_path: str | os.PathLike, merges_path: str | os.PathLike, special_tokens: Sequence[str] | None = None
    ) -> "Tokenizer":
        """Reads files in GPT-2's format (`encoder.json` and `vocab.bpe`, as `save` writes them, or `vocab.json` and
        `merges.txt`)."""
        return cls(files.read_vocab(vocab_path), files.read_merges(merges_path), special_tokens)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `encoder.json`, `vocab.bpe` (GPT-2's format) and `special_tokens.json` into `folder`."""
        files.write_files(Path(folder), self.vocab, self.merges)
        write_json(Path(folder) / SPECIAL_TOKENS_FILE, self.special_tokens)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Tokenizer":
        """Reads `tokenizer.json`, or what `save` wrote, or files as in `from_files`.

        Without a list of special tokens, `<|endoftext|>` is special if the vocabulary has it.
        """
        if not_a_pipe(path := Path(folder) / hugging_face.FILE).is_file():
            return cls(*hugging_face.read_tokenizer_json(path))
        vocab_path, merges_path = files.find_files(folder)
        vocab, merges = files.read_vocab(vocab_path), files.read_merges(merges_path)
        special_tokens: Any = [END_OF_TEXT] if END_OF_TEXT.encode() in vocab.values() else []
        if (path := Path(folder) / SPECIAL_TOKENS_FILE).exists():
            special_tokens = read_json(path)
            require(isinstance(special_tokens, list), f"{path} must be a JSON list of strings.")
        return cls(vocab, merges, special_tokens)

    @cached_property
    def tiktoken(self) -> "tiktoken.Encoding":
        """The same tokenizer as a `tiktoken.Encoding`, with the same ids.

        Raises `UserError` if tiktoken cannot express it: it needs all 256 bytes, ids of merged tokens that rise in
        the order of the merges, and no pair of tokens that make up a third one without being its merge.
        """
        import tiktoken

        lacking = "tiktoken needs all 256 single bytes in the vocabulary; encode with Tokenizer.encode."
        require(len(self._byte_ids) == 256, lacking)
        # tokens that are neither a byte, nor a merge's result, nor special cannot come up in text and are left out
        ranks = {bytes([byte]): token_id for byte, token_id in self._byte_ids.items()}
        ranks |= {left + right: self._ids[left + right] for left, right in self.merges}
        # tiktoken has no list of merges: it merges the neighbours whose joined bytes have the lowest id
        require(
            merges_of_ranks(ranks) == self.merges,
            "tiktoken cannot express these merges, because the ids of merged tokens do not rise in the order of the "
            "merges or a token can be made in two ways; encode with Tokenizer.encode.",
        )
        name = f"lmcore-{self.fingerprint[:16]}"
        return tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=self.special_ids)

    @cached_property
    def gigatoken(self) -> Any:
        """This tokenizer as a `gigatoken.Tokenizer` that knows no special tokens; None if that is not installed."""
        try:
            import gigatoken
        except ImportError:
            return None
        return gigatoken.Tokenizer.from_json(json.dumps(hugging_face.tokenizer_json(self.vocab, self.merges, {})))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "gigatoken"}  # cannot be pickled
