"""`workbook`: the notebooks executed, published and handed in, here or as Slurm jobs."""

from collections.abc import Sequence

from tyro.extras import SubcommandApp

from lmcore.cli import application
from lmcore.config import TrainConfig
from workbook.cli import jobs, notebooks, sweep
from workbook.run import run


def commands(arguments: Sequence[str]) -> SubcommandApp:
    """All commands; `submit train` with the defaults that its arguments ask for."""
    training = list(arguments[:2]) == ["submit", "train"]
    base = application.training.starting_config(arguments[2:]) if training else TrainConfig()
    submitted = (jobs.notebooks, jobs.train_command(base))
    groups = {"submit": ("The notebooks or a training run as Slurm jobs.", submitted)}
    internal = (jobs.requeue, sweep.work)  # for job.sh and `run_sweep`: not in the list of commands
    unlisted = [command for command in internal if [command.__name__] == list(arguments[:1])]
    listed = (run, notebooks.writeup, notebooks.handin, jobs.status, sweep.sweep)
    return application.commands((*listed, *unlisted), groups)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    return application.main(arguments, "workbook", commands)
