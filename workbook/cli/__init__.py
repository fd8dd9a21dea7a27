"""`workbook`: the notebooks executed, published and handed in, here or as Slurm jobs."""

from collections.abc import Sequence

from tyro.extras import SubcommandApp

from lmcore.cli import application
from workbook.cli import notebooks, sweep, teaching
from workbook.jobs import requeue, submit
from workbook.run import run


def commands(arguments: Sequence[str]) -> SubcommandApp:
    """All commands; those of job.sh and `run_sweep` only where they are called."""
    unlisted = [command for command in (requeue, sweep.work) if [command.__name__] == list(arguments[:1])]
    listed = (run, submit, sweep.sweep, notebooks.writeup, notebooks.handin, teaching.student, teaching.grade)
    return application.commands((*listed, *unlisted), {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    return application.main(arguments, "workbook", commands)
