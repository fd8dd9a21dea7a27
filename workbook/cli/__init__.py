"""`workbook`: the notebooks executed, published and handed in."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from lmcore.cli import application
from lmcore.errors import EXIT_FAILURE, require
from lmcore.stopping import stop_signals
from workbook.cli.teaching import grade
from workbook.handin import handin
from workbook.run import run
from workbook.student import student


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    data: Path,
    out: Path | None = None,
    recipe: str = "handout",
    steps: int | None = None,
) -> int:
    """Train the runs of a sweep that are neither done nor taken, then make one table of all that have begun.

    Given several times at once, or in each task of an array, the runs are shared. The table is OUT/results/NAME.json,
    with the learning curves beside it. Exit codes: 0 done, also if a run diverged or did not fit into the memory, 75
    stopped by a signal.

    Args:
        file: Python file with runs(base), which returns configurations by name, such as papermill_jobs/sweeps/NAME.py.
        data: Prepared corpus.
        out: Folder for everything that is made (default: runs/sweeps/NAME, in the current folder).
        recipe: What is varied: a recipe as for lmcore train --preset.
        steps: Steps of the recipe in place of its own.
    """
    with stop_signals():  # also while PyTorch is imported
        from workbook import sweep

        out = out or Path("runs") / "sweeps" / file.stem
        sweep.write_plan(out, sweep.planned(file, data, recipe, steps))
        sweep.work(out)
        rows, table = sweep.write_table(out, file.stem)
    columns = ["name", "outcome", "final_valid_loss", "best_valid_loss", "seconds"]
    print(f"{rows[columns].to_string(index=False)}\nWritten to {table}.")
    return 0


def writeup(out: Annotated[Path, tyro.conf.Positional], check: bool = False) -> int:
    """Make the writeup of an executed workbook again, or check the one that is there. Exit code 1: a notebook lacks.

    Args:
        out: The workbook's folder.
        check: Only verify that PDFs, notebooks, results and runs fit together, and that nothing was changed by hand.
    """
    if check:
        from workbook.report.verify import writeup_faults

        faults = writeup_faults(out)
        require(not faults, "\n".join(faults))
        print(f"Writeup complete: {', '.join(file.name for file in sorted((out / 'writeup').glob('*.pdf')))}.")
        return 0
    from workbook.record import read_records, unfinished
    from workbook.report.writeup import write_writeup

    print("\n".join(f"PDF: {pdf}" for pdf in write_writeup(out)))
    if lacking := unfinished(read_records(out)):
        print("\n".join(lacking), file=sys.stderr)
    return EXIT_FAILURE if lacking else 0


def commands(arguments: Sequence[str]) -> dict[str, application.Command]:
    """All commands; the one of `run_sweep` only where it is called."""
    listed = [run, sweep, writeup, handin, student, grade]
    if arguments[:1] == ["work"]:
        from workbook.sweep import work

        listed.append(work)
    return application.by_name(*listed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    return application.main(arguments, "workbook", commands)
