"""`workbook sweep ...`: what the tasks of a sweep run, and the table of its runs."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.stopping import stop_signals


def work(folder: Annotated[Path, tyro.conf.Positional], task: int | None = None) -> int:
    """Train, one after another, the runs of a sweep that nobody else has taken: one worker of `run_sweep`.

    Exit codes: 0 done, also if a run diverged or did not fit into the memory, 75 stopped by a signal.

    Args:
        folder: Folder with a sweep.json.
        task: Only the run of this number, from 0.
    """
    with stop_signals():  # also while PyTorch is imported
        from workbook.sweep import work

        work(folder, task)
    return 0


def table(out: Annotated[Path, tyro.conf.Positional]) -> int:
    """Make one table of the runs of a sweep that have begun: out/results/<name>.json, and their curves.

    Args:
        out: Folder of the sweep.
    """
    from workbook.jobs.sweeps import write_sweep_table

    rows, file = write_sweep_table(out)
    columns = ["name", "outcome", "final_valid_loss", "best_valid_loss", "seconds"]
    print(f"{rows[columns].to_string(index=False)}\nWritten to {file}.")
    return 0
