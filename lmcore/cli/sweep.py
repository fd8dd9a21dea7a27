"""`lmcore sweep`: many runs or measurements."""

from pathlib import Path
from typing import Annotated

import tyro


def sweep(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Train, one after another, the runs of a sweep that nobody else has taken: one worker of `lmcore.sweep.run_sweep`.

    Args:
        folder: Folder with a sweep.json.
    """
    from lmcore.sweep import work

    work(folder)
    return 0
