"""Validation loss by maximum learning rate, up to and past divergence (CSE599-O A1 problem *learning_rate*)."""

from lmcore.config import TrainConfig, replace

LEARNING_RATES = [3e-4, 1e-3, 2e-3, 4e-3, 1e-2, 1e-1]


def runs(base: TrainConfig) -> dict[str, TrainConfig]:
    return {f"lr_{rate:g}": replace(base, optimizer__learning_rate=rate) for rate in LEARNING_RATES}
