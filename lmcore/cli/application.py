"""`lmcore`: each command is a thin call into a function of the library, imported only when the command runs."""

import contextlib
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import tyro

from lmcore.cli import benchmark, data, jobs, memory, nsys, sweep, training, workbook
from lmcore.cli.arguments import PATHS, check_paths
from lmcore.cli.output import printing_safely
from lmcore.config import TrainConfig
from lmcore.errors import EXIT_FAILURE, EXIT_USER_ERROR, NO_ROOM, UserError, leave_to_first_rank
from lmcore.stopping import Stopped, stoppable
from lmcore.text import printable

EXIT_CTRL_C = 130

RENAMED = {"submission": "handin", "--passes": "--mode"}
"""Commands and options of version 0.1 by their names of today, which a use of the old one is told."""


def doctor(json: bool = False) -> int:
    """Say what this machine has: Python, torch, the device and why, disk, optional parts, data.

    Args:
        json: Print it as JSON.
    """
    from json import dumps

    from lmcore.doctor import as_text, examine

    facts = examine()
    print(dumps(facts, indent=2, ensure_ascii=False) if json else as_text(facts))
    return 0


GROUPS = {
    "data": ("Prepare, download and look at corpora.", (data.prepare, data.download, data.info)),
    "tokenizer": ("Train a tokenizer; encode and decode with one.", (data.train, data.encode, data.decode)),
    "sweep": (
        "What the tasks of a sweep run, and the table of its runs.",
        (sweep.work, sweep.table),
    ),
    "submit": (
        "The workbook, a sweep or a training run as Slurm jobs.",
        (jobs.workbook, jobs.sweep),
    ),
}
"""What a group of commands is for, and its commands."""


def application(arguments: Sequence[str]) -> tyro.extras.SubcommandApp:
    """All commands; `train` with the defaults that its arguments ask for."""
    chosen = arguments[0] if arguments else None
    app = tyro.extras.SubcommandApp()
    app.command(deferred(doctor))
    for name, (what, members) in GROUPS.items():
        group = tyro.extras.SubcommandApp()
        training_run = arguments[:2] == [name, "train"] if arguments else False
        base = training.starting_config(arguments[2:]) if training_run and name == "submit" else TrainConfig()
        for command in (*members, *([jobs.train_command(base)] if name == "submit" else [])):
            group.command(deferred(command))
        app.command(group, name=name, help=what)
    commands = [
        training.train_command(training.starting_config(arguments[1:]) if chosen == "train" else TrainConfig()),
        training.evaluate, training.generate, benchmark.benchmark, nsys.nsys, memory.memory,
        workbook.workbook, workbook.refresh, workbook.writeup, jobs.status, workbook.handin,
    ]  # fmt: skip
    for command in [*commands, jobs.requeue] if chosen == "requeue" else commands:  # only job.sh calls it: not listed
        app.command(deferred(command))
    return app


def deferred(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The command as a function that only takes its arguments and looks at paths: parsing ends before anything runs."""

    @functools.wraps(command)
    def parsed(*arguments: Any, **options: Any) -> Callable[[], int]:
        check_paths(command, inspect.signature(command).bind(*arguments, **options).arguments)
        return functools.partial(command, *arguments, **options)

    return parsed


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """The chosen command with its arguments. A value that a config refuses raises its own `UserError`.

    tyro would print such a sentence broken into a box, and prints its own ones so.
    """
    for old in arguments:
        if old in RENAMED and (old.startswith("-") or old == arguments[0]):
            raise UserError(f"{old} is called {RENAMED[old]} now.")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return application(arguments).cli(args=arguments, prog="lmcore", registry=PATHS)
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        if not said.getvalue():
            raise
        raise UserError(unboxed(said.getvalue())) from None


def unboxed(box: str) -> str:
    """What tyro says of wrong arguments, in one sentence.

    Its message is in the first section of a box, or in the second, after a title, where the terminal has no boxes.
    """
    lines = re.sub(r"(?m)^[╭╰].*$|│", "", box)
    sections = [" ".join(section.split()) for section in re.split(r"(?m)^\s*[─-]+\s*$", lines)]
    message = sections[0 if "╭" in box or len(sections) == 1 else 1]
    told = re.search(r"run:? (lmcore.*--help)", sections[-1])
    return f"{message.rstrip('.')}; see {told[1] if told else 'lmcore --help'}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. A user's mistake is one sentence on standard error and code 2."""
    print_any_character()
    try:
        with stoppable():
            try:
                command = parse(list(sys.argv[1:] if arguments is None else arguments))
            except UserError:
                leave_to_first_rank()
                raise
            with printing_safely():
                code = command()
            sys.stdout.flush()  # while an error of it can still be said
            return code
    except UserError as error:
        say(f"lmcore: {error}")
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader, such as head, has seen enough
        discard(sys.stdout)
        return EXIT_FAILURE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        discard(sys.stdout)
        where = f" ({error.filename})" if error.filename else ""
        say(f"lmcore: {error.strerror}{where}: make room, or write elsewhere, and run this again.")
        return EXIT_USER_ERROR
    except KeyboardInterrupt as error:
        say("lmcore: stopped.")
        return 128 + error.number if isinstance(error, Stopped) else EXIT_CTRL_C


def print_any_character() -> None:
    """Writes characters that the encoding of standard output or error lacks as escapes (\\u2013) instead of failing.

    This is what Python does on standard error. PYTHONIOENCODING may ask for another way, as in `latin-1:replace`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors.startswith(("strict", "surrogate")):  # they can fail
            stream.reconfigure(errors="backslashreplace")


def say(sentence: str) -> None:
    """Prints to standard error, or nowhere if that goes to a full disk: the exit code is still to be the right one."""
    try:
        print(printable(sentence), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds nowhere, or Python would try again to write it when it ends."""
    with contextlib.suppress(OSError):  # a stream in memory has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
