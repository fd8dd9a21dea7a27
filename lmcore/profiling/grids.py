"""Cells of the handouts' benchmarks: sizes, contexts, precisions and passes in every combination; warm-ups."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lmcore.profiling.workload import WorkloadConfig, workload_config


def size_cells(
    sizes: Sequence[str],
    contexts: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    passes: Sequence[str] = ("forward", "forward_backward", "train_step"),
    **changes: Any,
) -> dict[str, WorkloadConfig]:
    """Every combination, by names such as small-256-fp32-train_step; `changes` go to the model or the cell.

    Grids of one kind can be joined (`|`): a cell that is in both has one name. Raises `UserError` as
    `workload_config` does.
    """
    return {
        f"{size}-{context}-{precision}-{how_far}": workload_config(
            size, context, precision=precision, passes=how_far, **changes
        )
        for context, size, precision, how_far in itertools.product(contexts, sizes, precisions, passes)
    }


def grid_cells(
    sizes: Sequence[str], contexts: Sequence[int], passes: Mapping[str, Sequence[str]], **changes: Any
) -> dict[str, WorkloadConfig]:
    """`size_cells` with passes of its own for each precision: {"fp32": ["forward", "train_step"], "tf32": [...]}."""
    cells = {}
    for precision, how_far in passes.items():
        cells |= size_cells(sizes, contexts, [precision], how_far, **changes)
    return cells


def warmup_cells(
    sizes: Sequence[str], warmups: Sequence[int] = (0, 1, 2, 5), context: int = 256, **changes: Any
) -> dict[str, WorkloadConfig]:
    """Each size with each number of warm-ups (CS336 A2 benchmarking_script (c)), by names such as small-256-warm2."""
    return {
        f"{size}-{context}-warm{warmup}": workload_config(size, context, warmup_steps=warmup, **changes)
        for size, warmup in itertools.product(sizes, warmups)
    }


def component_cells(
    sizes: Sequence[str], contexts: Sequence[int], precisions: Sequence[str] = ("fp32",), **changes: Any
) -> dict[str, WorkloadConfig]:
    """Each size whose components are to be timed alone, by names such as small-256-fp32."""
    return {
        f"{size}-{context}-{precision}": workload_config(size, context, precision=precision, **changes)
        for context, size, precision in itertools.product(contexts, sizes, precisions)
    }
