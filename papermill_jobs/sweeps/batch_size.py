"""Validation loss and speed by batch size, up to what a GPU cannot hold (CSE599-O A1 problem *batch_size_experiment*).

Every run sees as many tokens as 500 steps of the base. Below the base's batch size the learning rate shrinks with its
square root, which keeps the noise of Adam's updates alike (Malladi et al. 2022).
"""

from lmcore.config import TrainConfig, replace
from workbook.report.variations import with_steps

BATCH_SIZES = [1, 4, 16, 64, 128, 512, 1024, 2048]


def runs(base: TrainConfig) -> dict[str, TrainConfig]:
    found = {}
    for size in BATCH_SIZES:
        rate = base.optimizer.learning_rate * min(1.0, size / base.batch_size) ** 0.5
        config = replace(base, batch_size=size, optimizer__learning_rate=float(f"{rate:.4g}"))
        found[f"batch_{size}"] = with_steps(config, max(1, 500 * base.tokens_per_step // config.tokens_per_step))
    return found
