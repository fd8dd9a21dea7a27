"""Speed on a CPU: loading batches and training steps, beside what else a user would pick, in one run.

    python benchmarks/cpu.py

A few minutes on two cores, which nothing else should use. The tokenizer has a command of its own beside this one,
`benchmarks/tokenizer.py`. Hugging Face's model takes part where transformers is installed
(`pip install -c constraints.txt -e '.[benchmark]'`).
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command, median_and_spread, turn_by_turn
from steps import Bench
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lmcore.accounting import num_parameters, training_flops
from lmcore.config import ModelConfig, TrainConfig, replace
from lmcore.data import batch_at_step
from lmcore.data.batches import read_ahead
from lmcore.errors import require
from lmcore.files import write_json
from lmcore.profiling.kernels.measuring import Contestant, Result, race
from lmcore.provenance import environment
from lmcore.recipes import RECIPES

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")

SIZES = ("smoke", "laptop")
"""Recipes that are meant for a CPU."""
SHAPES = ((32, 256), (256, 256), (4, 1024))
"""Batch sizes and context lengths of loading."""
MANY = 10**9

CONTESTANTS = (
    "lmcore plain", "lmcore sdpa", "lmcore compiled", "lmcore sdpa compiled", "lmcore fused", "Hugging Face",
    "Hugging Face compiled", "torch.nn", "torch.nn compiled",
)  # fmt: skip
"""Who trains; see `steps`."""
BATCHES = 8
TOLERANCE = 1e-3
"""How far the losses of the first steps may be apart, relatively: all compute the same function."""


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

    def write(name: str, **results: Any) -> None:
        """With where the numbers come from, and how busy the machine was."""
        versions = {"transformers": metadata.version("transformers") if util.find_spec("transformers") else None}
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        place = environment() | {"threads": threads, "load_average": load}
        write_json(out / name, {"environment": place, "versions": versions} | results)

    write("loader_benchmark.json", shapes=compare_loaders(repeats, tokens, seconds_per_turn / 3))
    training = []
    for size in sizes:
        require(size in RECIPES, f"There is no recipe {size!r}; choose from {', '.join(RECIPES)}.")
        result = compare_training(RECIPES[size], repeats, compiled, seconds_per_turn)
        shape = f"{result['batch_size']} × {result['context_length']} tokens, full step in float32"
        show(f"training {size}: {result['parameters'] / 1e6:.2f} M parameters, {shape}", result["contestants"])
        training.append({"size": size} | result)
        write("training_benchmark.json", sizes=training)
    print(f"written to {out}")


def timed(
    builders: Mapping[str, Callable[[], Contestant]], repeats: int, seconds_per_turn: float, call: str, tokens: int
) -> tuple[dict[str, Result], dict[str, dict[str, Any]]]:
    """Lets contestants take turns of some calls each, of so many tokens a call; results, and a row for each.

    Ratios, turn by turn, are to the first of them. One that cannot run here is a row that says why.
    """
    results = race(builders, CPU, len(builders) * repeats * seconds_per_turn, alone=False, rounds=repeats)
    seconds, first = {name: result.seconds for name, result in results.items()}, next(iter(results))
    rows: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        rows[name] = {"outcome": result.outcome}
        if not result.seconds:
            rows[name]["reason"] = result.reason
            continue
        rows[name] |= {f"seconds_per_{call}": result.seconds} | median_and_spread(result.seconds)
        rows[name] |= {"tokens_per_second": tokens / rows[name]["median"]}
        rows[name][f"times_{first.split()[-1]}"] = median_and_spread(turn_by_turn(seconds, name, first))
    return results, rows


def show(heading: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A table for people: time of a batch or a step with its spread, rate, and the ratio to the first."""
    print(heading)
    for name, row in rows.items():
        if "median" not in row:
            print(f"  {name:<22} absent: {row['reason']}")
            continue
        ratio = next(column for column in row if column.startswith("times_"))
        times = f"{1e3 * row['median']:8.3f} ms ({1e3 * row['low']:.3f} to {1e3 * row['high']:.3f})"
        rate = f"{row['tokens_per_second']:>13,.0f} tokens/s"
        print(f"  {name:<22} {times} {rate}  {row[ratio]['median']:.2f} × {ratio.removeprefix('times_')}")


# Loading


class Windows(Dataset):
    """Every window of a memmap and the same shifted by one, as a user of DataLoader writes it."""

    def __init__(self, x: np.ndarray, context_length: int):
        self.x, self.context_length = x, context_length

    def __len__(self) -> int:
        return len(self.x) - self.context_length

    def __getitem__(self, start: int) -> Batch:
        window = torch.from_numpy(self.x[start : start + self.context_length + 1].astype(np.int64))
        return window[:-1], window[1:]


def data_loader(x: np.ndarray, batch_size: int, context_length: int, workers: int) -> Iterator[Batch]:
    """Batches of PyTorch's DataLoader at random starts, which may come again, as in lmcore."""
    dataset = Windows(x, context_length)
    sampler = RandomSampler(dataset, replacement=True, num_samples=MANY)
    return iter(DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers))


def stacked(x: np.ndarray, batch_size: int, context_length: int) -> Iterator[Batch]:
    """Batches by a loop over their windows, stacked, as the handouts have it."""
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(x) - context_length, size=batch_size)
        windows = (np.stack([x[i + k : i + k + context_length].astype(np.int64) for i in starts]) for k in (0, 1))
        inputs, targets = map(torch.from_numpy, windows)
        yield inputs, targets


def compare_loaders(repeats: int, tokens: int, seconds_per_turn: float) -> list[dict[str, Any]]:
    """Takes batches of each shape from a file of random ids (uint16), the file's pages in memory."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50257, size=tokens, dtype=np.uint16).tofile(path)
        x = np.memmap(path, dtype=np.uint16, mode="r")
        for shape in SHAPES:
            config = TrainConfig(ModelConfig(context_length=shape[1]), batch_size=shape[0], steps=MANY)
            with closing(read_ahead(x, config, 0)) as reader:
                sources: dict[str, Iterator[Batch | Tensor]] = {
                    "lmcore": (batch_at_step(x, config, step, "cpu") for step in itertools.count()),
                    "lmcore, read ahead": reader,
                    "stacked loop": stacked(x, *shape),
                    "DataLoader": data_loader(x, *shape, 0),
                    "DataLoader, 2 workers": data_loader(x, *shape, 2),
                }
                for source in sources.values():
                    for _ in range(10):  # starts workers and touches pages
                        next(source)
                builders = {name: partial(Contestant, partial(next, source)) for name, source in sources.items()}
                results, rows = timed(builders, repeats, seconds_per_turn, "batch", config.tokens_per_step)
            for name, row in rows.items():
                row |= {"batches_per_turn": results[name].calls, "batches_per_second": 1 / row["median"]}
            show("loading {} × {} tokens".format(*shape), rows)
            head = dict(zip(("batch_size", "context_length"), shape, strict=True))
            found.append(head | {"tokens_in_file": len(x), "contestants": rows})
    return found


# Training


def compare_training(
    config: TrainConfig, repeats: int, compiled: bool = True, seconds_per_turn: float = 0.5
) -> dict[str, Any]:
    """Full steps (forward, backward, clipping, AdamW) in float32 of a configuration, in turns of some steps each.

    All start from the same weights and see the same batches. A contestant that cannot run here is a row that says why.
    Raises `UserError` if they do not compute the same.
    """
    config = replace(config, device="cpu", precision="fp32", model__tie_embeddings=False)
    bench = Bench(config, CPU, batches=BATCHES)
    builders = {name: partial(bench.build, name) for name in CONTESTANTS if compiled or "compiled" not in name}
    results, rows = timed(builders, repeats, seconds_per_turn, "step", config.tokens_per_step)
    expected = results["lmcore plain"].notes["losses"]
    for name, row in rows.items():
        if "median" in row:
            row["first_losses"] = results[name].notes["losses"]
            row["flops_per_second"] = training_flops(config.model, config.batch_size) / row["median"]
            for loss, other in zip(row["first_losses"], expected, strict=True):
                same = abs(loss - other) <= TOLERANCE * other
                require(same, f"{name} and lmcore plain do not compute the same: losses {loss} and {other}.")
    return {
        "parameters": num_parameters(config.model),
        "batch_size": config.batch_size,
        "context_length": config.model.context_length,
        "vocab_size": config.model.vocab_size,
        "steps_per_turn": results["lmcore plain"].calls,
        "repeats": repeats,
        "contestants": rows,
    }


if __name__ == "__main__":
    command(main)
