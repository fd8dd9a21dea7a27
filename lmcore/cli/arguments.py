"""Types of arguments that several commands have, as their help shows them."""

import dataclasses
import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from lmcore.errors import require, require_path

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A switch that is off unless it is named."""

OptionalFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalNumber = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
OptionalTime = Annotated[str | None, tyro.conf.arg(metavar="HH:MM:SS", help_behavior_hint="")]
Pairs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", help_behavior_hint="")]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]

PATHS = ConstructorRegistry()
"""How arguments of type `Path` are read: as by tyro, but an empty one becomes a blank, which is not the folder `.`."""


@PATHS.primitive_rule
def path_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """The rule for `Path`; None for other types."""
    if kind.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: Path(words[0] or " "),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


def check_paths(command: Callable[..., int], options: Mapping[str, Any]) -> None:
    """Raises `UserError` if a path among a command's options is empty, or its symbolic links lead in a circle.

    Text counts as a path where it names a corpus or a tokenizer.
    """
    hints = get_type_hints(command, include_extras=True)
    for name, value in options.items():
        if dataclasses.is_dataclass(value):  # options that several commands share
            check_paths(type(value), vars(value))
        positional = tyro.conf.Positional in getattr(hints.get(name), "__metadata__", ())
        option = name.upper() if positional else f"--{name.replace('_', '-')}"
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) or (isinstance(path, str) and name in ("source", "tokenizer")):
                require_path(option, str(path))
                try:
                    Path(path).stat()
                except OSError as error:
                    circle = error.errno == errno.ELOOP
                    require(not circle, f"{option}: the symbolic links of {path} lead in a circle.")
