"""`tokenizer.json`, the file of Hugging Face's tokenizers, for byte-level BPE with GPT-2's pretokens."""

import os
from collections.abc import Iterable
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import read_json
from lmcore.tokenizer.files import from_printable, to_printable

FILE = "tokenizer.json"

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
"""GPT-2's pretokens; in a decoder, from printable characters back to bytes."""

OFF = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
"""Settings of a BPE model by which ids would change."""


def tokenizer_json(
    vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]], special_ids: dict[str, int]
) -> dict[str, Any]:
    """The content of `tokenizer.json`. Special tokens stand in the vocabulary as they are, not in printable form."""
    names = {token_id: to_printable(token) for token_id, token in sorted(vocab.items())}
    names |= {token_id: token for token, token_id in special_ids.items()}
    require(len({*names.values()}) == len(names), "A special token reads like the printable form of another token.")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pairs = dict.fromkeys((to_printable(left), to_printable(right)) for left, right in merges)
    return {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": token} | flags for token, token_id in special_ids.items()],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": {name: id_ for id_, name in names.items()}, "merges": [*map(list, pairs)]},
    }


def read_tokenizer_json(path: str | os.PathLike) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str]]:
    """Vocabulary, merges and special tokens, as a `Tokenizer` takes them; every added token is special.

    Raises `UserError` if the file is missing or damaged, and naming what differs from byte-level BPE with GPT-2's
    pretokens.
    """
    content = read_json(path)
    try:
        model, added = content["model"], content["added_tokens"]
        require_gpt2_like(path, content)
        special = {token["content"]: token["id"] for token in added}
        vocab = {
            token_id: name.encode() if name in special else from_printable(name, path)
            for name, token_id in (model["vocab"] | special).items()
        }
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        merges = [(from_printable(left, path), from_printable(right, path)) for left, right in pairs]
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a whole tokenizer.json ({type(error).__name__}: {error}).") from error
    require(len(vocab) == len(model["vocab"] | special), f"{path} gives the same id to several tokens.")
    return vocab, merges, list(special)


def require_gpt2_like(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Raises `UserError` naming a setting by which the ids would not be those of GPT-2's rules."""
    model, split, after = content["model"], content.get("pre_tokenizer") or {}, content.get("post_processor") or {}
    known = split.get("type") == "ByteLevel" and split.get("use_regex", True) is True
    require(known, f"{path} splits text by another pattern than GPT-2's, the only one known here.")
    settings = {name: model.get(name) for name in OFF} | {"normalizer": content.get("normalizer")}
    settings |= {"add_prefix_space": split.get("add_prefix_space"), "model.type": model.get("type", "BPE") != "BPE"}
    settings["post_processor"] = after.get("type", "ByteLevel") != "ByteLevel" and after["type"]
    for token in content["added_tokens"]:
        settings |= {flag: token.get(flag) for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)}
    found = ", ".join(name for name, value in settings.items() if value)
    require(not found, f"{path} has the setting {found}, which lmcore's tokenizer lacks.")
