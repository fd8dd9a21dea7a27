"""`lmcore sweep ...`: many runs or measurements, as one command or as the tasks of a job array."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.cli.arguments import OptionalFolder, OptionalNumber, Pairs
from lmcore.errors import EXIT_FAILURE, require
from lmcore.stopping import stop_signals

Definition = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


def run(
    definition: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")],
    out: OptionalFolder = None,
    task: OptionalNumber = None,
    set: Pairs = (),
) -> int:
    """Do one task of a sweep, a run or a measurement, or all that are not finished, in turn.

    Exit codes: 0 done, also if a run diverged or did not fit into the memory, 1 one failed, 75 stopped by a signal:
    the same command resumes.

    Args:
        definition: Name of a definition in papermill_jobs/sweeps/, or a YAML file.
        out: Folder for the sweep (default: runs/sweeps/<name>).
        task: Number of the task, from 0 in the definition's order; default: all.
        set: Settings of the base, or values of a setting that is varied: steps=20, or
            optimizer.learning_rate=1e-3,1e-2.
    """
    with stop_signals():  # also while PyTorch is imported
        from lmcore.workbook.jobs.sweeps import load_definition, run_definition, sweep_folder

        sweep = load_definition(definition, set)
        return run_definition(sweep, out or sweep_folder(sweep), task)


def table(out: Annotated[Path, tyro.conf.Positional], definition: Definition = None, set: Pairs = ()) -> int:
    """Merge what a sweep has done into one table: a row for each run or measurement, whether it has run or not.

    It goes to out/results/<name>.json and .csv, for training runs with their curves, for measurements with each step.

    Exit codes: 0, or 1 if one failed.

    Args:
        out: Folder of the sweep.
        definition: Name of a definition, or a YAML file; default: the one that the folder remembers.
        set: As for lmcore sweep run, with --definition.
    """
    from lmcore.workbook.jobs.sweeps import REMEMBERED, load_definition, summary, write_sweep_table

    require(definition is not None or not set, "--set changes a definition: give --definition with it.")
    sweep = load_definition(definition or out / REMEMBERED, set)
    rows, file = write_sweep_table(sweep, out)
    print(f"{summary(sweep, rows)}\nWritten to {file} and .csv.")
    return EXIT_FAILURE if (rows["outcome"] == "failed").any() else 0


def work(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Train, one after another, the runs of a sweep that nobody else has taken: one worker of `run_sweep`.

    Args:
        folder: Folder with a sweep.json.
    """
    with stop_signals():
        from lmcore.workbook.sweep import work

        work(folder)
    return 0
