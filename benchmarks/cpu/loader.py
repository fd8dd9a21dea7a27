"""Batches per second out of a memmap of tokens: lmcore beside PyTorch's DataLoader and the loop of the handouts."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from cpu.turns import median_and_spread, take_turns, turn_by_turn
from lmcore.config import ModelConfig, TrainConfig
from lmcore.data import batch_at_step
from lmcore.data.batches import BatchReader

Batch = tuple[Tensor, Tensor]
SHAPES = ((32, 256), (256, 256), (4, 1024))
"""Batch sizes and context lengths."""
MANY = 10**9


class Windows(Dataset):
    """Every window of a memmap and the same shifted by one, as a user of DataLoader writes it."""

    def __init__(self, x: np.ndarray, context_length: int):
        self.x, self.context_length = x, context_length

    def __len__(self) -> int:
        return len(self.x) - self.context_length

    def __getitem__(self, start: int) -> Batch:
        window = torch.from_numpy(self.x[start : start + self.context_length + 1].astype(np.int64))
        return window[:-1], window[1:]


def stacked(x: np.ndarray, batch_size: int, context_length: int) -> Iterator[Batch]:
    """Batches by a loop over their windows, stacked."""
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(x) - context_length, size=batch_size)
        inputs = np.stack([x[i : i + context_length].astype(np.int64) for i in starts])
        targets = np.stack([x[i + 1 : i + 1 + context_length].astype(np.int64) for i in starts])
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def data_loader(x: np.ndarray, batch_size: int, context_length: int, workers: int) -> Iterator[Batch]:
    """Batches of PyTorch's DataLoader at random starts, which may come again, as in lmcore."""
    dataset = Windows(x, context_length)
    sampler = RandomSampler(dataset, replacement=True, num_samples=MANY)
    return iter(DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers))


def read_ahead(reader: BatchReader) -> Iterator[Batch]:
    """Batches of the thread that training on a GPU uses, without the copy to it."""
    while isinstance(buffer := reader.take(), Tensor):
        yield buffer[0], buffer[1]
        reader.give_back(buffer)


def compare_loaders(
    repeats: int, tokens: int, seconds_per_turn: float, shapes: tuple[tuple[int, int], ...] = SHAPES
) -> list[dict[str, Any]]:
    """Takes batches of each shape from a file of random ids (uint16), the file's pages in memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50257, size=tokens, dtype=np.uint16).tofile(path)
        x = np.memmap(path, dtype=np.uint16, mode="r")
        return [compare_shape(x, *shape, repeats, seconds_per_turn) for shape in shapes]


def compare_shape(
    x: np.ndarray, batch_size: int, context_length: int, repeats: int, seconds_per_turn: float
) -> dict[str, Any]:
    """All contestants on batches of one shape, in turns of about the same length."""
    config = TrainConfig(ModelConfig(context_length=context_length), batch_size=batch_size, steps=MANY)
    shape = (batch_size, context_length)
    with BatchReader(x, config, 0, pinned=False) as reader:
        sources: dict[str, Iterator[Batch]] = {
            "lmcore": (batch_at_step(x, config, step, "cpu") for step in itertools.count()),
            "lmcore, read ahead": read_ahead(reader),
            "stacked loop": stacked(x, *shape),
            "DataLoader": data_loader(x, *shape, 0),
            "DataLoader, 2 workers": data_loader(x, *shape, 2),
        }
        counts = {name: batches_per_turn(source, seconds_per_turn) for name, source in sources.items()}
        turns = take_turns({name: taker(source, counts[name]) for name, source in sources.items()}, repeats)
    per_batch = {name: [value / counts[name] for value in seconds] for name, seconds in turns.items()}
    rows = {}
    for name, seconds in per_batch.items():
        rows[name] = {"batches_per_turn": counts[name], "seconds_per_batch": seconds} | median_and_spread(seconds)
        rows[name]["batches_per_second"] = 1 / rows[name]["median"]
        rows[name]["tokens_per_second"] = batch_size * context_length / rows[name]["median"]
        rows[name]["times_lmcore"] = median_and_spread(turn_by_turn(per_batch, name, "lmcore"))
    return {"batch_size": batch_size, "context_length": context_length, "tokens_in_file": len(x), "contestants": rows}


def taker(source: Iterator[Batch], count: int) -> Callable[[], None]:
    """Takes `count` batches each time."""

    def take() -> None:
        for _ in itertools.islice(source, count):
            pass

    return take


def batches_per_turn(source: Iterator[Batch], seconds: float) -> int:
    """How many batches take about `seconds`, after a few that start workers and touch pages."""
    taker(source, 10)()
    (measured,) = take_turns({"": taker(source, 20)}, 1)[""]
    return max(20, round(20 * seconds / measured))


def print_loaders(results: list[dict[str, Any]]) -> None:
    """The rates and ratios, for people."""
    for result in results:
        print(f"loading {result['batch_size']} × {result['context_length']} tokens")
        for name, row in result["contestants"].items():
            print(
                f"  {name:<22} {1e3 * row['median']:8.3f} ms ({1e3 * row['low']:.3f} to {1e3 * row['high']:.3f})"
                f"  {row['tokens_per_second'] / 1e6:8.1f} M tokens/s  {row['times_lmcore']['median']:.2f} × lmcore"
            )
