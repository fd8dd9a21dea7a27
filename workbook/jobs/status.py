"""`workbook status`: the jobs of output folders by squeue and sacct, and what they printed last."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lmcore.errors import UserError
from workbook.jobs.slurm import call
from workbook.jobs.submit import submitted
from workbook.notebook import ANSI_ESCAPE

QUEUED = ("--me", "--states=all", "--format=%.18i %.20j %.13T %.11M  %R")
FORGOTTEN = ("--noheader", "--allocations", "--format=JobID%18,JobName%20,State%13,Elapsed%11")
"""Options of squeue and sacct for the same columns."""

TAIL_BYTES = 1 << 16
"""So much of the end of a log is read."""


def status(outs: Sequence[Path]) -> str:
    """The jobs of the output folders, as text for the terminal."""
    lines = []
    for out in outs:
        ids = [*submitted(out).values()]
        lines += ["", str(out), *table(ids)]
        logs = [log for id in ids for log in sorted((out / "jobs").glob(f"*-{id}[._]*"))]
        lines += [f"  {log.name}: {words}" for log in logs if (words := last_line(log))]
    return "\n".join(lines).strip()


def table(ids: Sequence[str]) -> list[str]:
    """squeue's own lines on these jobs, then, where there is accounting, sacct's on those that it has forgotten."""
    try:
        lines = call("squeue", *QUEUED).splitlines()
    except UserError as error:
        return [f"  Slurm does not answer ({str(error).rstrip('.')}): the states are unknown."]
    known = {line.split()[0]: line for line in lines if line.strip()}
    lines = [*lines[:1], *(known[id] for id in ids if id in known)]
    with suppress(UserError):  # many sites have no accounting
        if forgotten := [id for id in ids if id not in known]:
            lines += call("sacct", *FORGOTTEN, f"--jobs={','.join(forgotten)}").splitlines()
    return lines


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, of a progress bar its last state; '' where there is none."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        text = ANSI_ESCAPE.sub("", file.read().decode(errors="replace")).replace("\r", "\n")
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
