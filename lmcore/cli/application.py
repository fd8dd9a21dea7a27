"""`lmcore`: each command is a thin call into a function of the library, imported only when the command runs."""

import contextlib
import difflib
import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass
from typing import Any

import tyro
from tyro.extras import SubcommandApp

from lmcore.cli import benchmark, chat, data, doctor, exchange, memory, nsys, profile, runs, training
from lmcore.cli.output import printable, printing_safely
from lmcore.config import TrainConfig
from lmcore.errors import EXIT_FAILURE, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR, NO_ROOM, UserError
from lmcore.stopping import stoppable

Command = Callable[..., int]


Commands = Mapping[str, Command | tuple[str, dict[str, Command]]]
"""Functions by their names; those of two words by the first one, with what they are for."""

Application = Callable[[Sequence[str]], Commands]
"""What makes the commands of a program, by name: it sees the arguments, by which some choose their defaults."""


def application(arguments: Sequence[str]) -> Commands:
    """All commands; `train` with the defaults that its arguments ask for."""
    base = training.starting_config(arguments[1:]) if arguments[:1] == ["train"] else TrainConfig()
    trained = (training.train_command(base, arguments), training.evaluate, training.generate, chat.chat, chat.play)
    trained += (exchange.export, exchange.import_)
    profilers = (benchmark.benchmark, nsys.nsys, memory.memory, profile.profile)
    groups = {
        "data": ("Prepare and look at corpora.", by_name(data.prepare, data.info)),
        "tokenizer": ("Train a tokenizer.", by_name(data.train)),
    }
    return by_name(doctor.doctor, *trained, *profilers, runs.runs) | groups


def by_name(*functions: Command) -> dict[str, Command]:
    """Functions as commands."""
    return {function.__name__.removesuffix("_"): function for function in functions}


def chosen(commands: Commands, arguments: Sequence[str], prog: str) -> Callable[[], int]:
    """The command that the arguments name, with its own. The options of the others are not even looked at."""
    command = commands.get(arguments[0]) if arguments else None
    if command is None:
        for meant in difflib.get_close_matches(arguments[0], commands, 1) if arguments else ():
            raise UserError(f"There is no command {arguments[0]}; did you mean {meant}?")
        return overview(commands).cli(args=arguments, prog=prog)
    prog, arguments = f"{prog} {arguments[0]}", arguments[1:]
    if isinstance(command, tuple):
        return chosen(command[1], arguments, prog)
    return tyro.cli(deferred(command), args=arguments, prog=prog)


def overview(commands: Commands) -> SubcommandApp:
    """The names of the commands and what they are for, for the help."""
    app = SubcommandApp()
    for name, command in commands.items():
        purpose = command[0] if isinstance(command, tuple) else str(command.__doc__).partition("\n\n")[0]
        app.command(make_dataclass(name, ()), name=name, help=purpose)  # tyro is slow with unions of functions
    return app


def deferred(command: Command) -> Callable[..., Callable[[], int]]:
    """The command as a function that only takes its arguments: parsing ends before anything runs."""

    @functools.wraps(command)
    def parsed(*arguments: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *arguments, **options)

    return parsed


def parse(arguments: Sequence[str], prog: str, application: Application) -> Callable[[], int]:
    """The chosen command with its arguments. tyro explains wrong ones, and exits with code 2.

    A value that a config refuses raises the config's own `UserError`, which tyro would print in a box.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return chosen(application(arguments), arguments, prog)
    except SystemExit as stop:
        if isinstance(stop.__context__, Exception) and isinstance(stop.__context__.__context__, UserError):
            raise stop.__context__.__context__ from None
        sys.stderr.write(printable(said.getvalue()))
        raise


def main(arguments: Sequence[str] | None = None, prog: str = "lmcore", application: Application = application) -> int:
    """Runs a command of `prog` and returns its exit code. A user's mistake is one sentence on standard error, code 2.

    `application` makes the program's commands of the arguments.
    """
    try:
        with stoppable():
            command = parse(list(sys.argv[1:] if arguments is None else arguments), prog, application)
            with printing_safely():
                code = command()
            sys.stdout.flush()  # while an error of it can still be said
            return code
    except UserError as error:
        print(f"{prog}: {printable(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (RuntimeError, MemoryError) as error:
        from lmcore.device import out_of_memory_reason

        if (reason := out_of_memory_reason(error)) is None:
            raise
        print(f"{prog}: out of memory: {printable(reason) or 'of the host'}", file=sys.stderr)
        return EXIT_OUT_OF_MEMORY
    except OSError as error:
        piped = isinstance(error, BrokenPipeError)  # the reader, such as head, has seen enough
        if not piped and error.errno not in NO_ROOM and error.filename is None:
            raise
        with contextlib.suppress(OSError):  # what standard output still holds goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if piped:
            return EXIT_FAILURE
        where = f" ({error.filename})" * bool(error.filename)
        remedy = ": make room, or write elsewhere" * (error.errno in NO_ROOM)
        print(f"{prog}: {error.strerror}{printable(where)}{remedy}.", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt as error:
        print(f"{prog}: stopped.", file=sys.stderr)
        return 128 + getattr(error, "number", signal.SIGINT)
