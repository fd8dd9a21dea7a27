"""`workbook sweep`: the runs that a Python file defines, one after another or each in the task of an array of jobs."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.stopping import stop_signals


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    data: Path,
    out: Path | None = None,
    recipe: str = "handout",
    steps: int | None = None,
    task: int | None = None,
) -> int:
    """Train the runs of a sweep that are neither done nor taken, then make one table of all that have begun.

    The table is OUT/results/NAME.json, with the learning curves beside it. Exit codes: 0 done, also if a run diverged
    or did not fit into the memory, 75 stopped by a signal.

    Args:
        file: Python file with runs(base), which returns configurations by name, such as papermill_jobs/sweeps/NAME.py.
        data: Prepared corpus.
        out: Folder for everything that is made (default: runs/sweeps/NAME, in the current folder).
        recipe: What is varied: a recipe as for lmcore train --preset.
        steps: Steps of the recipe in place of its own.
        task: Train only the run of this number, from 0.
    """
    with stop_signals():  # also while PyTorch is imported
        from workbook import sweep

        out = out or Path("runs") / "sweeps" / file.stem
        sweep.write_plan(out, sweep.planned(file, data, recipe, steps))
        sweep.work(out, task)
        rows, table = sweep.write_table(out, file.stem)
    columns = ["name", "outcome", "final_valid_loss", "best_valid_loss", "seconds"]
    print(f"{rows[columns].to_string(index=False)}\nWritten to {table}.")
    return 0


def work(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Train the runs of a folder with a sweep.json that are neither done nor taken: one worker of `run_sweep`.

    Args:
        folder: Folder of the sweep.
    """
    with stop_signals():
        from workbook.sweep import work

        work(folder)
    return 0
