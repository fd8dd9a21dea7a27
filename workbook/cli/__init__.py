"""`workbook`: the notebooks executed, published and handed in, here or as Slurm jobs."""

from collections.abc import Sequence

import tyro

from lmcore.cli import application
from lmcore.config import TrainConfig
from workbook.cli import jobs, notebooks, sweep


def commands(arguments: Sequence[str]) -> tyro.extras.SubcommandApp:
    """All commands; `submit train` with the defaults that its arguments ask for."""
    training = list(arguments[:2]) == ["submit", "train"]
    base = application.training.starting_config(arguments[2:]) if training else TrainConfig()
    app = tyro.extras.SubcommandApp()
    groups = {
        "submit": (
            "The notebooks, a sweep or a training run as Slurm jobs.",
            (jobs.notebooks, jobs.sweep, jobs.train_command(base)),
        ),
        "sweep": ("What the tasks of a sweep run, and the table of its runs.", (sweep.work, sweep.table)),
    }
    for command in (notebooks.run, notebooks.refresh, notebooks.writeup, notebooks.handin, jobs.status):
        app.command(application.deferred(command))
    application.add_groups(app, groups)
    if arguments[:1] == ["requeue"]:  # only job.sh calls it: not listed
        app.command(application.deferred(jobs.requeue))
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    return application.main(arguments, "workbook", commands)
