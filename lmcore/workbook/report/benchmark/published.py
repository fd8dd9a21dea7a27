"""What the optimisation report found, on its machine: facts to hold measurements against, and no others."""

import pandas as pd

PUBLISHED = {
    "machine": "one NVIDIA A100 (40 GB)",
    "num_layers": 12, "batch_context": 512, "context_batch": 8, "optimization_batch": 16, "optimization_context": 1024,
    "speedup_low": 2.0, "speedup_high": 4.0, "saving_low": 0.25, "saving_high": 0.33,
    "checkpointing": {"memory": 19 / 26 - 1, "throughput": 3119 / 3731 - 1},
    "fused attention": {"memory": 23 / 26 - 1, "throughput": 0.07},
    "context_memory": {128: 5.0e9, 512: 13e9, 1024: 25e9},
}  # fmt: skip
"""What the report found on its machine: FP16 against FP32 over batch sizes, and changes against its baseline."""


def is_published_setting(rows: pd.DataFrame, **settings: str) -> bool:
    """Whether all rows have the report's depth and, by column, the entries of `PUBLISHED` that `settings` names."""
    wanted = {"num_layers": "num_layers"} | settings
    return all((rows[column] == PUBLISHED[key]).all() for column, key in wanted.items())
