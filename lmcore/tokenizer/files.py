"""Files in GPT-2's format: `encoder.json` (token -> id) and `vocab.bpe` (one merge a line).

Hugging Face calls the same files `vocab.json` and `merges.txt`.
Both write the bytes of a token as printable characters (Radford et al. 2019): a byte whose Latin-1 character can be
seen stands for itself, the others take the characters from U+0100 on, so that a space is written Ġ.
"""

import os
from pathlib import Path

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, not_a_pipe, read_json, write_json
from lmcore.text import read_text

ENCODER_FILE, MERGES_FILE = "encoder.json", "vocab.bpe"
FILE_NAMES = ((ENCODER_FILE, MERGES_FILE), ("vocab.json", "merges.txt"))

_VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_TO_CHARACTER = {byte: chr(byte) for byte in _VISIBLE} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


def to_printable(token: bytes) -> str:
    """The printable form of a token's bytes: `to_printable(b" the") == "Ġthe"`."""
    return "".join(BYTE_TO_CHARACTER[byte] for byte in token)


def from_printable(text: str, path: str | os.PathLike) -> bytes:
    """The bytes of a printable form found in the file `path`. Raises `UserError` if it is none."""
    try:
        return bytes([CHARACTER_TO_BYTE[character] for character in text])
    except KeyError as error:
        raise UserError(
            f"{path} holds the token {text!r}, whose character {error.args[0]!r} is not in GPT-2's byte alphabet; "
            "give files in GPT-2's format."
        ) from None


def find_files(folder: str | os.PathLike) -> tuple[Path, Path]:
    """Vocabulary and merges in `folder`, by the first pair of `FILE_NAMES` that is there; `UserError` if none is."""
    pairs = [(Path(folder) / vocab, Path(folder) / merges) for vocab, merges in FILE_NAMES]
    found = [pair for pair in pairs if all(not_a_pipe(path).is_file() for path in pair)]
    names = ", nor ".join(" and ".join(pair) for pair in FILE_NAMES)
    require(bool(found), f"There is no tokenizer in {folder}: it has neither {names}.")
    return found[0]


def read_vocab(path: str | os.PathLike) -> dict[int, bytes]:
    """Reads `encoder.json`; returns id -> bytes. Raises `UserError` if it is missing or not in that format."""
    encoder = read_json(path)
    require(
        isinstance(encoder, dict) and encoder != {} and all(type(token_id) is int for token_id in encoder.values()),
        f"{path} is not a tokenizer vocabulary: it must be a JSON object of tokens and whole-number ids.",
    )
    vocab = {token_id: from_printable(token, path) for token, token_id in encoder.items()}
    require(len(vocab) == len(encoder), f"{path} gives the same id to several tokens.")
    return vocab


def read_merges(path: str | os.PathLike) -> list[tuple[bytes, bytes]]:
    """Reads `vocab.bpe`, with or without its header. Raises `UserError` if it is missing or not in that format."""
    merges = []
    for number, line in enumerate("".join(read_text(Path(path))).split("\n"), 1):
        pair = line.removesuffix("\r").split(" ")
        if pair == [""] or (number == 1 and line.startswith("#version")):
            continue
        wrong = f"{path}, line {number}: a merge is two tokens with a space between, not {line!r}."
        require(len(pair) == 2 and all(pair), wrong)
        merges.append((from_printable(pair[0], path), from_printable(pair[1], path)))
    return merges


def write_files(folder: Path, vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]]) -> None:
    """Writes `encoder.json` and `vocab.bpe` into `folder`, each whole or not at all."""
    write_json(folder / ENCODER_FILE, {to_printable(vocab[token_id]): token_id for token_id in sorted(vocab)})
    with atomic_write(folder / MERGES_FILE, "w") as file:
        file.write("#version: 0.2\n")
        file.writelines(f"{to_printable(left)} {to_printable(right)}\n" for left, right in merges)
