"""`lmcore`: each command is a thin call into a function of the library, imported only when the command runs."""

import contextlib
import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tyro.extras import SubcommandApp

from lmcore.cli import benchmark, chat, data, doctor, memory, nsys, training
from lmcore.cli.output import printable, printing_safely
from lmcore.config import TrainConfig
from lmcore.errors import EXIT_FAILURE, EXIT_USER_ERROR, NO_ROOM, UserError
from lmcore.stopping import stoppable

Application = Callable[[Sequence[str]], SubcommandApp]
"""What makes the commands of a program: it sees the arguments, by which some choose their defaults."""


def application(arguments: Sequence[str]) -> SubcommandApp:
    """All commands; `train` with the defaults that its arguments ask for."""
    base = training.starting_config(arguments[1:]) if arguments[:1] == ["train"] else TrainConfig()
    trained = (training.train_command(base), training.evaluate, training.generate, chat.chat, chat.play)
    groups = {
        "data": ("Prepare and look at corpora.", (data.prepare, data.info)),
        "tokenizer": ("Train a tokenizer; encode and decode with one.", (data.train, data.encode, data.decode)),
    }
    return commands((doctor.doctor, *trained, benchmark.benchmark, nsys.nsys, memory.memory), groups)


def commands(
    functions: Iterable[Callable[..., int]], groups: Mapping[str, tuple[str, Iterable[Callable[..., int]]]]
) -> SubcommandApp:
    """Functions as commands; by the first word of those of two words what they are for, and the functions."""
    app = SubcommandApp()
    for function in functions:
        app.command(deferred(function))
    for name, (what, members) in groups.items():
        app.command(commands(members, {}), name=name, help=what)
    return app


def deferred(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
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
            return application(arguments).cli(args=arguments, prog=prog)
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
    except OSError as error:
        piped = isinstance(error, BrokenPipeError)  # the reader, such as head, has seen enough
        if not piped and error.errno not in NO_ROOM:
            raise
        with contextlib.suppress(OSError):  # what standard output still holds goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if piped:
            return EXIT_FAILURE
        where = f" ({error.filename})" if error.filename else ""
        print(f"{prog}: {error.strerror}{where}: make room, or write elsewhere.", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt as error:
        print(f"{prog}: stopped.", file=sys.stderr)
        return 128 + getattr(error, "number", signal.SIGINT)
