"""The command `lmcore`: one file for each group of commands, each command a thin call into the library."""

from lmcore.cli.application import main

__all__ = ["main"]
