"""`lmcore jobs`: what became of submitted jobs, and what they are doing."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.cli.arguments import Flag, OptionalNumber

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OUT ...]", help_behavior_hint="")]


def jobs(outs: Folders = (), tail: OptionalNumber = None, json: Flag = False) -> int:
    """Show the jobs of output folders: state, attempts, what they are doing, time left, why they wait, and logs.

    The time left is that of the training run or the array at hand, from the rate of the present attempt.

    Args:
        outs: Output folders (default: all in runs/ and runs/sweeps/ that have jobs, here and in the scratch folder).
        tail: Show so many last lines of each log (default: one of those that failed).
        json: Print it as JSON.
    """
    from lmcore.workbook.jobs.found import folders_with_jobs, runs_folders
    from lmcore.workbook.jobs.status import status_of
    from lmcore.workbook.jobs.table import as_json, as_text

    folders = list(outs) or [folder for runs in runs_folders() for folder in folders_with_jobs(runs)]
    rows, fault = status_of(folders, tail)
    if not rows and not json:
        places = " or ".join(f"{place}/" for place in outs or runs_folders())
        print(f"No jobs: none was submitted for a folder in {places}. To submit the workbook: lmcore submit workbook")
        return 0
    print((as_json if json else as_text)(rows, fault))
    return 0
