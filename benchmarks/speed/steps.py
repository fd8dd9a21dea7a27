"""Full training steps in bf16 over float32 weights: time, memory by length, and what each optimization adds."""

from dataclasses import replace
from functools import partial

import torch
from steps import Bench

from lmcore.accounting import training_flops
from lmcore.config import OptimizerConfig, TrainConfig, model_config
from lmcore.device import device_name, peak_flops

from .cells import step_cell
from .rows import OURS, SECONDS_OF_A_MEMORY_ROW, Cell, Conditions, Rows, Work


def measure(cell: Cell, conditions: Conditions) -> Rows:
    """A whole step of each of the cell's contestants on one batch, from the same weights.

    How far the loss fell over the first steps is noted as a multiple of the first contestant's fall.
    """
    s, device = cell.settings, torch.device(conditions.device)
    torch.set_float32_matmul_precision("high")
    model = model_config(s["size"], context_length=s["context_length"], vocab_size=s["vocab_size"])
    optimizer = OptimizerConfig(learning_rate=1e-4)
    config = TrainConfig(model, optimizer, batch_size=s["batch_size"], precision=s["precision"])
    bench = Bench(config, device, conditions.toy)
    peak = peak_flops(device_name(device), s["precision"])
    ideal = None if peak is None else training_flops(model, config.batch_size) / peak
    builders, reference = {name: partial(bench.build, name) for name in s["contestants"]}, [bench.reference()]
    share_of = "peak of the data sheet"
    rows = Work(builders, config.tokens_per_step, "tok/s", ideal, share_of, False, reference).rows(cell, conditions)
    noted = [row["notes"] for row in rows if "losses" in row["notes"]]
    falls = [notes["losses"][0] - notes["losses"][-1] for notes in noted]
    for notes, fall in zip(noted, falls, strict=True):
        if falls[0] != 0:
            notes["fall_beside_first"] = round(fall / falls[0], 4)
    return rows


def memory(cell: Cell, conditions: Conditions) -> Rows:
    """A whole step, as the definition does it and as our kernels do, by length."""
    s, rows = cell.settings, []
    for length in s["lengths"]:
        part = step_cell(s["size"], s["batch_size"], length, ("lmcore plain", OURS), 0)
        part = replace(part, row=f"memory-step-{length}", group="memory", work=f"{cell.work}: {length:,}")
        rows += measure(part, replace(conditions, seconds=SECONDS_OF_A_MEMORY_ROW))
    return rows
