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

from lmcore.files import write_json
from lmcore.provenance import environment

SIZES = ("smoke", "laptop")
"""Recipes that are meant for a CPU."""


def main(repeats: int = 9, threads: int = 2, sizes: tuple[str, ...] = SIZES, out: Path = Path("results/cpu")) -> None:
    """Measures, prints tables and writes them.

    Args:
        repeats: how many turns each contestant takes.
        threads: of PyTorch, for training.
        sizes: recipes whose training is measured.
        out: folder of loader_benchmark.json and training_benchmark.json.
    """
    torch.set_num_threads(threads)
    loaders = compare_loaders(repeats)
    print_loaders(loaders)
    write_json(out / "loader_benchmark.json", provenance(threads) | {"shapes": loaders})
    training = []
    for size in sizes:
        training.append(compare_training(size, repeats))
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
