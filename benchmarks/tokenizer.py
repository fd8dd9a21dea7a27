"""Speed of lmcore's tokenizer beside Hugging Face `tokenizers` (training) and tiktoken (encoding), in one run.

    python benchmarks/tokenizer.py ../shared/data/tinystories/train.txt.gz

All take turns on the same text, so that what else the machine does falls on each of them; medians are compared.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
import tyro
from cpu.turns import take_turns, turn_by_turn
from tiktoken_ext.openai_public import r50k_pat_str

from lmcore.data import load_gpt2
from lmcore.errors import UserError
from lmcore.files import sha256_file, write_json
from lmcore.provenance import environment
from lmcore.text import END_OF_TEXT, read_text
from lmcore.tokenizer import Tokenizer, train_bpe
from lmcore.tokenizer.files import to_printable
from lmcore.tokenizer.train import available_cores

Merges = list[tuple[str, str]]


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
    content = "".join(read_text(text))
    documents = content.split(END_OF_TEXT)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "text.txt"
        plain.write_bytes(content.encode())
        training = compare_training(plain, documents, vocab_size, repeats)
    encoding = compare_encoding(documents, load_gpt2(gpt2), repeats)
    result = {
        "environment": environment() | {"available_cores": available_cores()},
        "versions": {name: metadata.version(name) for name in ("tokenizers", "tiktoken", "regex")},
        "text": {"name": text.name, "sha256": sha256_file(text), "bytes_plain": len(content.encode())},
        "training": training,
        "encoding": encoding,
        "taught_encoder": compare_taught_encoder(documents, load_gpt2(gpt2), repeats),
    }
    write_json(out, result)
    print_table(result)
    print(f"written to {out}")


def summary(seconds: dict[str, list[float]], ours: str, theirs: str) -> dict[str, Any]:
    """All seconds, their medians, and how many times as long ours took: medians, and turn by turn."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": medians[ours] / medians[theirs],
        "ratio_by_turn": turn_by_turn(seconds, ours, theirs),
    }


def hugging_face() -> tuple[tokenizers.Tokenizer, Callable[[int], Any]]:
    """Hugging Face's byte-level BPE, and a maker of its trainer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer, lambda vocab_size: tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def hugging_face_merges(documents: list[str], vocab_size: int) -> Merges:
    """Merges that Hugging Face makes of the documents. From a file it would train on the special tokens' text too."""
    tokenizer, trainer = hugging_face()
    tokenizer.train_from_iterator(documents, trainer(vocab_size))
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def compare_training(plain: Path, documents: list[str], vocab_size: int, repeats: int) -> dict[str, Any]:
    """Trains with both from the same file, on all cores."""

    def train_theirs() -> None:
        tokenizer, trainer = hugging_face()
        tokenizer.train([str(plain)], trainer(vocab_size))

    def train_ours() -> None:
        train_bpe(plain, vocab_size, [END_OF_TEXT])

    contestants = {"lmcore": train_ours, "hugging_face": train_theirs}
    result = {"vocab_size": vocab_size} | summary(take_turns(contestants, repeats), "lmcore", "hugging_face")
    merges = train_bpe(plain, vocab_size, [END_OF_TEXT])[1]
    ours = [(to_printable(left), to_printable(right)) for left, right in merges]
    theirs = hugging_face_merges(documents, vocab_size)
    # the two choose differently among equally frequent pairs; with Hugging Face's choice our merges would be the same
    return result | {"merges": len(ours), "merges_in_common": len(set(ours) & set(theirs))}


def compare_encoding(documents: list[str], gpt2: Tokenizer, repeats: int) -> dict[str, Any]:
    """Encodes all documents with GPT-2's tokenizer: our bulk encoding, tiktoken itself, and our plain Python."""
    ranks = {token: token_id for token_id, token in gpt2.vocab.items() if token_id != gpt2.eot_id}
    theirs = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: gpt2.eot_id}
    )
    expected = theirs.encode_ordinary_batch(documents, num_threads=available_cores())
    if gpt2.encode_documents(documents) != expected:
        raise UserError("Bulk encoding and tiktoken disagree on this text, so their speeds cannot be compared.")
    some = documents[: max(1, len(documents) // 8)]
    # a tokenizer for each turn that has not yet seen a word
    fresh = iter([Tokenizer(gpt2.vocab, gpt2.merges, gpt2.special_tokens) for _ in range(repeats)])

    def encode_in_python() -> None:
        tokenizer = next(fresh)
        for document in some:
            tokenizer.encode(document)

    contestants = {
        "lmcore_bulk": lambda: gpt2.encode_documents(documents),
        "tiktoken": lambda: theirs.encode_ordinary_batch(documents, num_threads=available_cores()),
        "lmcore_python": encode_in_python,
    }
    tokens = sum(map(len, expected))
    result = summary(take_turns(contestants, repeats), "lmcore_bulk", "tiktoken")
    counts = {"lmcore_bulk": tokens, "tiktoken": tokens, "lmcore_python": sum(map(len, expected[: len(some)]))}
    rates = {name: counts[name] / result["median_seconds"][name] for name in contestants}
    return {"tokens": counts, "tokens_per_second": rates} | result


def compare_taught_encoder(documents: list[str], gpt2: Tokenizer, repeats: int) -> dict[str, Any]:
    """`Tokenizer.encode` beside tiktoken on one core: a text's first pass, a second one, and one letter 20,000 times.

    The time of the letters is also compared with that of twice as many.
    """
    encoding, text = gpt2.to_tiktoken(), END_OF_TEXT.join(documents)[:1_000_000]
    fresh = iter([Tokenizer(gpt2.vocab, gpt2.merges, gpt2.special_tokens) for _ in range(repeats)])
    warm = Tokenizer(gpt2.vocab, gpt2.merges, gpt2.special_tokens)
    contestants = {
        "first_pass": lambda: next(fresh).encode(text),
        "warm": lambda: warm.encode(text),
        "tiktoken": lambda: encoding.encode(text, allowed_special="all"),
        "letters": lambda: warm.encode("a" * 20_000),
        "letters_doubled": lambda: warm.encode("a" * 40_000),
        "letters_tiktoken": lambda: encoding.encode("a" * 20_000),
    }
    if contestants["warm"]() != contestants["tiktoken"]():
        raise UserError("Tokenizer.encode and tiktoken disagree on this text, so their speeds cannot be compared.")
    seconds = take_turns(contestants, repeats)
    pairs = {
        "first_pass": ("first_pass", "tiktoken"),
        "warm": ("warm", "tiktoken"),
        "letters": ("letters", "letters_tiktoken"),
        "doubling": ("letters_doubled", "letters"),
    }
    ratios = {name: statistics.median(turn_by_turn(seconds, *pair)) for name, pair in pairs.items()}
    return {"characters": len(text), "seconds": seconds, "ratios": ratios}


def print_table(result: dict[str, Any]) -> None:
    """The medians and ratios, for people."""
    training, encoding = result["training"], result["encoding"]
    print(
        f"{result['text']['name']}: {result['text']['bytes_plain'] / 1e6:.1f} MB, "
        f"{result['environment']['available_cores']} cores"
    )
    print(f"training {training['vocab_size']} tokens")
    for name, seconds in training["median_seconds"].items():
        print(f"  {name:<14} {seconds:8.2f} s")
    print(
        f"  lmcore takes {training['ratio']:.2f} times as long; "
        f"{training['merges_in_common']} of {training['merges']} merges in common"
    )
    print("encoding with GPT-2's tokenizer")
    for name, rate in encoding["tokens_per_second"].items():
        print(f"  {name:<14} {rate / 1e6:8.2f} M tokens/s")
    print(f"  lmcore_bulk takes {encoding['ratio']:.2f} times as long as tiktoken")
    print("Tokenizer.encode on one core, times as long as tiktoken; doubling: as half the letters")
    for name, ratio in result["taught_encoder"]["ratios"].items():
        print(f"  {name:<14} {ratio:8.2f}")


if __name__ == "__main__":
    tyro.cli(main)
