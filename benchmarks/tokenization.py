"""Encoding a text, and training a tokenizer on it: lmcore beside tiktoken, gigatoken and rustbpe, on a CPU.

    python benchmarks/tokenization.py tinystories_valid.txt    # documents with <|endoftext|> between

Contestants take turns, each turn with other documents; those that encode must return the same ids. rustbpe only trains.
"""

from importlib import import_module, util
from pathlib import Path
from time import perf_counter

import numpy as np
import tyro

from lmcore.data import load_tokenizer
from lmcore.files import sha256_file, write_json
from lmcore.provenance import environment
from lmcore.tokenizer import END_OF_TEXT, GPT2_PATTERN, train_bpe
from lmcore.tokenizer.train import available_cores


def main(text: tyro.conf.Positional[Path], tokenizer: str = "gpt2", vocab_size: int = 4096, turns: int = 9,
         out: Path = Path("results/cpu/tokenization.json")) -> None:  # fmt: skip
    """Writes MB/s of each contestant, and the `ratio` to the first of the same work in the same turn."""
    documents, rows = text.read_text("utf-8").split(END_OF_TEXT), []
    trainer = util.find_spec("rustbpe") and import_module("rustbpe").Tokenizer
    works = {
        f"encode, threads: {n}": {
            "tiktoken": lambda own, texts, n=n: own.tiktoken.encode_ordinary_batch(texts, num_threads=n),
            "gigatoken to arrays": lambda own, texts, n=n: own.gigatoken.encode_batch(texts, parallel=n > 1),
            "gigatoken to lists": lambda own, texts, n=n: own.gigatoken.encode_batch_list(texts, parallel=n > 1),
            "lmcore": lambda own, texts, n=n: own.encode_documents(texts) if n > 1 else [*map(own.encode, texts)],
        }
        for n in (1, available_cores())
    }
    works[f"train {vocab_size:,} tokens"] = {
        "lmcore": lambda own, texts: train_bpe(text, vocab_size, [END_OF_TEXT]),
        "rustbpe": lambda own, texts: trainer().train_from_iterator(texts, vocab_size - 1, pattern=GPT2_PATTERN),
    }
    for work, calls in works.items():
        taking = {name: (load_tokenizer(tokenizer), []) for name in calls if util.find_spec(name.split()[0])}
        for turn in range(turns + 1):  # the first warms up
            given, ids = documents if "train" in work else documents[turn :: turns + 1], {}
            for name, (own, rates) in [*taking.items()][:: -1 if turn % 2 else 1]:
                began = perf_counter()
                ids[name] = calls[name](own, given)
                rates.append(1e-6 / (perf_counter() - began) * len("".join(given).encode()))
            lists = [made.to_list() if "arrays" in name else made for name, made in ids.items()]
            assert "train" in work or lists == lists[:1] * len(lists), f"{work}: {', '.join(ids)} give different ids."
        for name in calls:
            rows.append({"work": work, "contestant": name, "outcome": "absent", "reason": "not installed"})
            if name in taking:
                rates, beside = (np.array(taking[other][1][1:]) for other in (name, next(iter(calls))))
                rows[-1] |= {"outcome": "complete", "reason": None, "ratio": np.median(rates / beside)}
                rows[-1] |= {"mb_per_second": np.median(rates), "low": rates.min(), "high": rates.max()}
    write_json(out, {"provenance": environment(), "text": text.name, "text_sha256": sha256_file(text), "rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
