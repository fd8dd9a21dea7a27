"""`workbook`: the notebooks executed, published, handed in and graded."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from lmcore.cli import application
from lmcore.errors import EXIT_FAILURE, require
from lmcore.stopping import stop_signals
from workbook.grading.limits import Limits
from workbook.handin import handin
from workbook.parameters import find_project
from workbook.run import run
from workbook.student import student


def sweep(
    file: Annotated[Path, tyro.conf.Positional],
    data: Path,
    out: Path | None = None,
    recipe: str = "handout",
    steps: int | None = None,
) -> int:
    """Train the runs of a sweep that are neither done nor taken; `lmcore runs OUT` compares them.

    Given several times at once, or in each task of an array, the runs are shared. Exit codes: 0 done, also if a run
    diverged or did not fit into the memory, 75 stopped by a signal.

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
        return sweep.work(out)


def writeup(out: Annotated[Path, tyro.conf.Positional], check: bool = False) -> int:
    """Make the writeup of an executed workbook again, or check the one that is there. Exit code 1: one is missing.

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


def grade(
    handins: Annotated[Path, tyro.conf.Positional],
    to: Path = Path("grades"),
    handout: str = "cse599o-a1-part2",
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits(),  # noqa: B008 (never changed)
    at_once: int = 2,
) -> int:
    """Grade a folder of hand-ins: exercises run again, answers from tables, tables from records, training replayed.

    Args:
        handins: A folder with a folder or an archive for each student.
        to: Where the course's table, rubrics and Gradescope's files go.
        handout: Whose problems: the name of a PDF.
        limits: Of the code of a hand-in.
        at_once: Hand-ins that are graded at the same time.
    """
    import pandas as pd

    from workbook.grading.grade import grade_course
    from workbook.report.writeup import HANDOUTS

    names = [each.name for each in HANDOUTS.values()]
    require(handins.is_dir(), f"There is no folder {handins}.")
    require(handout in names, f"handout is one of {', '.join(names)}, not {handout!r}.")
    require(min(limits.seconds, limits.memory, at_once) > 0, "seconds, memory and at_once must be positive.")
    grade_course(handins, to, find_project(), handout, limits, at_once)
    table = pd.read_csv(to / "grades.csv")[["student", "score", "of", "first fault"]].fillna("")
    print(table.to_markdown(index=False))
    print(f"Grades: {to / 'grades.csv'}")
    return 0


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
