"""Speed on a CPU: loading batches and training steps, beside what else a user would pick, in one run.

    python benchmarks/cpu.py

A few minutes on two cores, which nothing else should use. The tokenizer has a command of its own beside this one,
`benchmarks/tokenizer.py`. Hugging Face's model takes part where transformers is installed
(`pip install -c constraints.txt -e '.[benchmark]'`).
"""

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import tyro
from cpu.loader import compare_loaders, print_loaders
from cpu.training import compare_training, print_training

from lmcore.errors import require
from lmcore.files import write_json
from lmcore.provenance import environment
from lmcore.recipes import RECIPES

SIZES = ("smoke", "laptop")
"""Recipes that are meant for a CPU."""


def main(
    repeats: int = 9,
    threads: int = 2,
    sizes: tuple[str, ...] = SIZES,
    compiled: bool = True,
    seconds_per_turn: float = 0.5,
    tokens: int = 100_000_000,
    out: Path = Path("results/cpu"),
) -> None:
    """Measures, prints tables and writes them.

    Args:
        repeats: how many turns each contestant takes.
        threads: of PyTorch, for training.
        sizes: recipes whose training is measured.
        compiled: whether compiled contestants take part in training.
        seconds_per_turn: how long about a contestant trains before the next one does; for loading it is a third.
        tokens: length of the file that batches are read from.
        out: folder of loader_benchmark.json and training_benchmark.json.
    """
    torch.set_num_threads(threads)
    loaders = compare_loaders(repeats, tokens, seconds_per_turn / 3)
    print_loaders(loaders)
    write_json(out / "loader_benchmark.json", provenance(threads) | {"shapes": loaders})
    training = []
    for size in sizes:
        require(size in RECIPES, f"There is no recipe {size!r}; choose from {', '.join(RECIPES)}.")
        training.append({"size": size} | compare_training(RECIPES[size], repeats, compiled, seconds_per_turn))
        print_training(training[-1])
        write_json(out / "training_benchmark.json", provenance(threads) | {"sizes": training})
    print(f"written to {out}")


def provenance(threads: int) -> dict[str, Any]:
    """Where the numbers come from, and how busy the machine was."""
    versions = {}
    for name in ("transformers",):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"environment": environment() | {"threads": threads, "load_average": load}, "versions": versions}


if __name__ == "__main__":
    tyro.cli(main)
