"""`lmcore submission`: the hand-in."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from lmcore.cli.arguments import Flag


def submission(
    out: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[OUT]", help_behavior_hint="")] = None,
    to: Path = Path("submission"),
    names: Literal["cse599o", "cs336"] = "cse599o",
    incomplete: Flag = False,
) -> int:
    """Make the hand-in: code.zip without caches, data, checkpoints or secrets, the answers' PDF, the learning curve.

    Args:
        out: Folder of an executed workbook (default: that in runs/ whose writeup was made last).
        to: Folder for the hand-in.
        names: cse599o: code.zip and answers.pdf; cs336: code.zip and writeup.pdf.
        incomplete: Also where the writeup is missing, out of date or reports a failure.
    """
    from lmcore.workbook.handin import describe, make_handin, newest_writeup
    from lmcore.workbook.jobs.status import runs_folders
    from lmcore.workbook.parameters import find_project

    out = out or newest_writeup(runs_folders())
    print(describe(make_handin(find_project(), out, to, names, incomplete)))
    return 0
