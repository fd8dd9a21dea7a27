"""Speed of lmcore's tokenizer beside Hugging Face `tokenizers` (training) and tiktoken (encoding), in one run.

    python benchmarks/tokenizer.py ../shared/data/tinystories/train.txt.gz

All take turns on the same text, so that what else the machine does falls on each of them; medians are compared.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
import tyro
from common import command, take_turns, turn_by_turn
from tiktoken_ext.openai_public import r50k_pat_str

from lmcore.data import load_gpt2
from lmcore.errors import require
from lmcore.files import sha256_file, write_json
from lmcore.provenance import environment
from lmcore.text import END_OF_TEXT, read_text
from lmcore.tokenizer import Tokenizer, train_bpe
from lmcore.tokenizer.files import to_printable
from lmcore.tokenizer.train import available_cores


def main(
    text: tyro.conf.Positional[Path],
    vocab_size: int = 10_000,
    repeats: int = 5,
    gpt2: Path | None = None,
    out: Path = Path("results/cpu/tokenizer_benchmark.json"),
) -> None:
    """Measures, prints a table and writes it.

    Args:
        text: UTF-8 text, plain or .gz, with <|endoftext|> between documents.
        vocab_size: tokens of the trained vocabulary.
        repeats: how often each measurement is taken.
        gpt2: folder of GPT-2's files; by default wherever `load_gpt2` finds them.
        out: the JSON file to write.
    """
    content, tokenizer = "".join(read_text(text)), load_gpt2(gpt2)
    documents, size = content.split(END_OF_TEXT), len(content.encode())
    print(f"{text.name}: {size / 1e6:.1f} MB, {available_cores()} cores")
    result = {
        "environment": environment() | {"available_cores": available_cores()},
        "versions": {name: metadata.version(name) for name in ("tokenizers", "tiktoken", "regex")},
        "text": {"name": text.name, "sha256": sha256_file(text), "bytes_plain": size},
        "training": compare_training(content, vocab_size, repeats),
        "encoding": compare_encoding(documents, tokenizer, repeats),
        "taught_encoder": compare_taught_encoder(documents, tokenizer, repeats),
    }
    write_json(out, result)
    print(f"written to {out}")


def compared(contestants: Mapping[str, Callable[[], Any]], repeats: int, ours: str, theirs: str) -> dict[str, Any]:
    """All seconds, their medians, and how many times as long ours took: medians, and turn by turn."""
    seconds = take_turns(contestants, repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {"seconds": seconds, "median_seconds": medians, "ratio": medians[ours] / medians[theirs]}
    return result | {"ratio_by_turn": turn_by_turn(seconds, ours, theirs)}


def show(heading: str, values: dict[str, float], unit: str = "") -> None:
    """One value a line."""
    print(heading, *(f"  {name:<14} {value:8.2f}{unit}" for name, value in values.items()), sep="\n")


def compare_training(content: str, vocab_size: int, repeats: int) -> dict[str, Any]:
    """Trains with lmcore and with Hugging Face's byte-level BPE from the same file, on all cores.

    Merges are compared with those that Hugging Face makes of the documents: from a file it would train on the special
    tokens' text, too. The two choose differently among equally frequent pairs.
    """

    def trained_by_hugging_face(train: Callable) -> tokenizers.Tokenizer:
        tokenizer, byte_level = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        settings = {"special_tokens": [END_OF_TEXT], "initial_alphabet": byte_level.alphabet(), "show_progress": False}
        train(tokenizer, tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, **settings))
        return tokenizer

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "text.txt"
        plain.write_bytes(content.encode())
        contestants = {
            "lmcore": lambda: train_bpe(plain, vocab_size, [END_OF_TEXT]),
            "hugging_face": lambda: trained_by_hugging_face(
                lambda theirs, trainer: theirs.train([str(plain)], trainer)
            ),
        }
        result = {"vocab_size": vocab_size} | compared(contestants, repeats, "lmcore", "hugging_face")
        merges = contestants["lmcore"]()[1]
    documents = content.split(END_OF_TEXT)
    theirs = trained_by_hugging_face(lambda theirs, trainer: theirs.train_from_iterator(documents, trainer))
    in_common = {tuple(pair) for pair in json.loads(theirs.to_str())["model"]["merges"]}
    in_common &= {(to_printable(left), to_printable(right)) for left, right in merges}
    show(f"training {vocab_size} tokens", result["median_seconds"], " s")
    print(f"  lmcore takes {result['ratio']:.2f} times as long; {len(in_common)} of {len(merges)} merges in common")
    return result | {"merges": len(merges), "merges_in_common": len(in_common)}


def compare_encoding(documents: list[str], gpt2: Tokenizer, repeats: int) -> dict[str, Any]:
    """Encodes all documents with GPT-2's tokenizer: our bulk encoding, tiktoken itself, and our plain Python."""
    ranks = {token: token_id for token_id, token in gpt2.vocab.items() if token_id != gpt2.eot_id}
    special = {END_OF_TEXT: gpt2.eot_id}
    theirs = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    expected = theirs.encode_ordinary_batch(documents, num_threads=available_cores())
    same = gpt2.encode_documents(documents) == expected
    require(same, "Bulk encoding and tiktoken disagree on this text, so their speeds cannot be compared.")
    some, fresh = max(1, len(documents) // 8), unused(gpt2, repeats)
    contestants = {
        "lmcore_bulk": lambda: gpt2.encode_documents(documents),
        "tiktoken": lambda: theirs.encode_ordinary_batch(documents, num_threads=available_cores()),
        "lmcore_python": lambda: [*map(next(fresh).encode, documents[:some])],
    }
    result = compared(contestants, repeats, "lmcore_bulk", "tiktoken")
    counts = {name: sum(map(len, expected[: some if name == "lmcore_python" else None])) for name in contestants}
    rates = {name: counts[name] / result["median_seconds"][name] for name in contestants}
    show("encoding with GPT-2's tokenizer", {name: rate / 1e6 for name, rate in rates.items()}, " M tokens/s")
    print(f"  lmcore_bulk takes {result['ratio']:.2f} times as long as tiktoken")
    return {"tokens": counts, "tokens_per_second": rates} | result


def unused(gpt2: Tokenizer, count: int) -> Iterator[Tokenizer]:
    """Tokenizers that have not yet seen a word, made beforehand: one for each turn."""
    return iter([Tokenizer(gpt2.vocab, gpt2.merges, gpt2.special_tokens) for _ in range(count)])


def compare_taught_encoder(documents: list[str], gpt2: Tokenizer, repeats: int) -> dict[str, Any]:
    """`Tokenizer.encode` beside tiktoken on one core: a text's first pass, a second one, and one letter 20,000 times.

    The time of the letters is also compared with that of twice as many.
    """
    encoding, text = gpt2.to_tiktoken(), END_OF_TEXT.join(documents)[:1_000_000]
    fresh, (warm,) = unused(gpt2, repeats), unused(gpt2, 1)
    contestants = {
        "first_pass": lambda: next(fresh).encode(text),
        "warm": lambda: warm.encode(text),
        "tiktoken": lambda: encoding.encode(text, allowed_special="all"),
        "letters": lambda: warm.encode("a" * 20_000),
        "letters_doubled": lambda: warm.encode("a" * 40_000),
        "letters_tiktoken": lambda: encoding.encode("a" * 20_000),
    }
    same = contestants["warm"]() == contestants["tiktoken"]()
    require(same, "Tokenizer.encode and tiktoken disagree on this text, so their speeds cannot be compared.")
    seconds = take_turns(contestants, repeats)
    pairs = {"first_pass": "tiktoken", "warm": "tiktoken", "letters": "letters_tiktoken", "letters_doubled": "letters"}
    ratios = {name: statistics.median(turn_by_turn(seconds, name, other)) for name, other in pairs.items()}
    ratios["doubling"] = ratios.pop("letters_doubled")
    show("Tokenizer.encode on one core, times as long as tiktoken; doubling: as half the letters", ratios)
    return {"characters": len(text), "seconds": seconds, "ratios": ratios}


if __name__ == "__main__":
    command(main)
