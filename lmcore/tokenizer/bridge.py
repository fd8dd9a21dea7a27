"""Between our vocabulary and merges and `tiktoken.Encoding`, which does the bulk encoding."""

from typing import TYPE_CHECKING

from lmcore.errors import require
from lmcore.tokenizer.pretokenize import GPT2_PATTERN

if TYPE_CHECKING:
    import tiktoken


def to_encoding(
    name: str, vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]], special_ids: dict[str, int]
) -> "tiktoken.Encoding":
    """A `tiktoken.Encoding` with the same ids. Raises `UserError` if tiktoken cannot express the tokenizer.

    tiktoken has no list of merges: it merges the neighbours whose joined bytes have the lowest id. Tokens that are
    neither a byte, nor a merge's result, nor special cannot come up in text and are left out.
    """
    import tiktoken

    ids = {token: token_id for token_id, token in vocab.items()}
    ranks = {bytes([byte]): ids[bytes([byte])] for byte in range(256) if bytes([byte]) in ids}
    require(len(ranks) == 256, "tiktoken needs all 256 single bytes in the vocabulary; encode with Tokenizer.encode.")
    ranks |= {left + right: ids[left + right] for left, right in merges}
    require(
        merges_of_ranks(ranks) == merges,
        "tiktoken cannot express these merges, because the ids of merged tokens do not rise in the order of the "
        "merges or a token can be made in two ways; encode with Tokenizer.encode.",
    )
    return tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special_ids)


def from_encoding(encoding: "tiktoken.Encoding") -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str]]:
    """Vocabulary, merges and special tokens of an encoding. Raises `UserError` if its pretokens are not GPT-2's."""
    from tiktoken_ext.openai_public import r50k_pat_str

    # tiktoken has no public name for pattern and ranks; its own registry passes them under these
    require(
        encoding._pat_str in (GPT2_PATTERN, GPT2_PATTERN.replace("++", "+"), _PUBLISHED_PATTERN, r50k_pat_str),
        f"The encoding {encoding.name!r} splits text by another pattern than GPT-2's, the only one known here.",
    )
    ranks, special_ids = encoding._mergeable_ranks, encoding._special_tokens
    merges = merges_of_ranks(ranks)
    for parts in merges:
        require(len(parts) == 2, f"{encoding.name!r} is not BPE: no merge of two tokens makes {b''.join(parts)!r}.")
    vocab = {token_id: token for token, token_id in ranks.items()}
    vocab |= {token_id: token.encode() for token, token_id in special_ids.items()}
    return vocab, merges, list(special_ids)


_PUBLISHED_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""As GPT-2's release writes it (openai/gpt-2, src/encoder.py)."""


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[bytes, ...]]:
    """The merges behind tiktoken's ranks, in their order.

    A token's merge is found by encoding its bytes with the lower ranks alone. If that leaves more than two parts, no
    merge makes the token, and those parts are given.
    """
    longer = [(rank, token) for token, rank in ranks.items() if len(token) > 1]
    return [_encode_below(token, ranks, rank) for rank, token in sorted(longer)]


def _encode_below(token: bytes, ranks: dict[bytes, int], limit: int) -> tuple[bytes, ...]:
    """`token` in parts, merged by the ranks below `limit`, lowest and leftmost first."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if rank >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)
