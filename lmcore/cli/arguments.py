"""Types of arguments that several commands have, as their help shows them."""

from pathlib import Path
from typing import Annotated

import tyro

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A switch that is off unless it is named."""

OptionalFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalNumber = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
OptionalTime = Annotated[str | None, tyro.conf.arg(metavar="HH:MM:SS", help_behavior_hint="")]
Pairs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...", help_behavior_hint="")]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]
