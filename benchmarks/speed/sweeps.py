"""Cells that go through several lengths in one process: rows for figures."""

from dataclasses import replace

from . import attention, cells, steps
from .rows import Cell, Conditions, Row
from .targets import CUDNN, FLASH

SECONDS_OF_A_MEMORY_ROW = 0.2
"""Times are a by-product where memory is what is asked for."""


def lengths(cell: Cell, conditions: Conditions) -> list[Row]:
    """Attention at a constant number of tokens, by length."""
    s, rows = cell.settings, []
    for length in s["lengths"]:
        settings = attention.settings(
            s["head_size"], length, s["passes"], s["tokens"] // length, s["heads"],
            contestants=[CUDNN, FLASH, "lmcore flash"],
        )  # fmt: skip
        name = cells.attention_row(s["head_size"], length, s["passes"])
        work = cells.attention_work(s["head_size"], length, s["passes"])
        part = Cell(name, "attention", work, "", settings, 0)
        share = replace(conditions, seconds=conditions.seconds / len(s["lengths"]))
        rows += attention.measure(part, share)
    return rows


def attention_memory(cell: Cell, conditions: Conditions) -> list[Row]:
    """Attention forward and backward of one sequence, by its length: what the scores cost, and what it is without."""
    s, rows = cell.settings, []
    for length in s["lengths"]:
        settings = attention.settings(
            s["head_size"], length, "both", 1, s["heads"],
            contestants=["plain", "SDPA", "lmcore flash"], unchecked=True,
        )  # fmt: skip
        part = Cell(f"memory-attention-{length}", "memory", f"{cell.work}: {length:,}", "", settings, 0)
        rows += attention.measure(part, replace(conditions, seconds=SECONDS_OF_A_MEMORY_ROW))
    return rows


def step_memory(cell: Cell, conditions: Conditions) -> list[Row]:
    """A whole step, as the definition does it and as our kernels do, by length."""
    s, rows = cell.settings, []
    for length in s["lengths"]:
        settings = steps.settings(s["size"], s["batch_size"], length, ("lmcore plain", steps.OURS))
        part = Cell(f"memory-step-{length}", "memory", f"{cell.work}: {length:,}", "", settings, 0)
        rows += steps.measure(part, replace(conditions, seconds=SECONDS_OF_A_MEMORY_ROW))
    return rows
