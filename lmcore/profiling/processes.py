"""Ends processes with all that they started."""

import contextlib

import psutil

SECONDS_TO_END = 1.0
"""How long a process that is stopped has to end what it has started, before all of it is killed."""


def end_with_children(pid: int) -> None:
    """Ends a process and all that it started, whichever group they are in: first it is asked, then all are forced."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        family[0].terminate()
    for process in psutil.wait_procs(family, timeout=SECONDS_TO_END)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
