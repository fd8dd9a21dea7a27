"""Validation loss by maximum learning rate, up to and past divergence (CSE599-O A1 problem *learning_rate*)."""

from lmcore.config import TrainConfig
from lmcore.recipes import learning_rate_runs


def runs(base: TrainConfig) -> dict[str, TrainConfig]:
    return learning_rate_runs(base, [3e-4, 1e-3, 2e-3, 4e-3, 1e-2, 1e-1])
