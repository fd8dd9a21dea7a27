"""Validation loss and speed by batch size, up to what a GPU cannot hold (CSE599-O A1 problem *batch_size_experiment*).

Every run sees as many tokens as 500 steps of the base.
"""

from lmcore.config import TrainConfig
from lmcore.recipes import batch_size_runs


def runs(base: TrainConfig) -> dict[str, TrainConfig]:
    return batch_size_runs(base, [1, 4, 16, 64, 128, 512, 1024, 2048], tokens=500 * base.tokens_per_step)
