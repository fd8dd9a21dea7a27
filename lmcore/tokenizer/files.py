"""GPT-2's tokenizer files: `encoder.json` (token -> id) and `vocab.bpe` (one merge a line), and where they are found.

Both write the bytes of a token as printable characters (Radford et al. 2019): a byte whose Latin-1 character can be
seen stands for itself, the others take the characters from U+0100 on, so that a space is written Ġ.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, read_json, sha256_file, write_json

ENCODER_FILE, MERGES_FILE = "encoder.json", "vocab.bpe"
HEADER = "#version: 0.2"

_VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_TO_CHARACTER = {byte: chr(byte) for byte in _VISIBLE} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}

BASE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
"""Where tiktoken fetches GPT-2's files, and the name under which it caches them."""

SHA256 = {
    ENCODER_FILE: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    MERGES_FILE: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FOLDER_VARIABLE = "LMCORE_GPT2"
DEFAULT_FOLDER = Path("data/gpt2")
DOWNLOAD_TIMEOUT = 15
"""Seconds without an answer after which a download is given up."""


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
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a list of merges ({error}).") from error
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        require(
            len(pair) == 2 and all(pair),
            f"{path}, line {number}: a merge is two tokens with a space between, not {line!r}.",
        )
        merges.append((from_printable(pair[0], path), from_printable(pair[1], path)))
    return merges


def write_files(folder: str | os.PathLike, vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]]) -> None:
    """Writes `encoder.json` and `vocab.bpe` into `folder`, each whole or not at all."""
    write_json(Path(folder) / ENCODER_FILE, {to_printable(vocab[token_id]): token_id for token_id in sorted(vocab)})
    with atomic_write(Path(folder) / MERGES_FILE, "w") as file:
        file.write(HEADER + "\n")
        file.writelines(f"{to_printable(left)} {to_printable(right)}\n" for left, right in merges)


def find_gpt2(folder: str | os.PathLike | None, download: bool) -> list[Path]:
    """GPT-2's `encoder.json` and `vocab.bpe`, as `load_gpt2` looks for them."""
    named = folder or os.environ.get(FOLDER_VARIABLE)
    if named or all((DEFAULT_FOLDER / name).is_file() for name in SHA256):
        return [Path(named or DEFAULT_FOLDER) / name for name in SHA256]
    return [_cached(name, download) for name in SHA256]


def _cached(name: str, download: bool) -> Path:
    """The file in tiktoken's cache, downloaded to there if need be, checked by its SHA-256."""
    import pooch

    # the same variables, folder and names as in tiktoken.load, so that both use one copy
    variables = (os.environ.get(variable) for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"))
    folder = next(filter(None, variables), None) or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    url = BASE_URL + name
    remedy = (
        f"put {ENCODER_FILE} and {MERGES_FILE} into {DEFAULT_FOLDER} or name their folder in the environment variable "
        f"{FOLDER_VARIABLE}."
    )
    cached = Path(folder) / hashlib.sha1(url.encode()).hexdigest()
    present = cached.is_file() and sha256_file(cached) == SHA256[name]
    require(download or present, f"GPT-2's {name} is not on this machine; {remedy}")
    try:
        path = pooch.retrieve(
            url,
            known_hash=f"sha256:{SHA256[name]}",
            fname=cached.name,
            path=folder,
            downloader=pooch.HTTPDownloader(timeout=DOWNLOAD_TIMEOUT),
        )
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        raise UserError(
            f"GPT-2's {name} is not on this machine and could not be downloaded from {url} "
            f"({type(error).__name__}); {remedy}"
        ) from error
    return Path(path)
