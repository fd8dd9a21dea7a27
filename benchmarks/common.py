"""What the commands share: contestants that take turns, so that what else the machine does falls on each of them."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import tyro


def take_turns(
    contestants: Mapping[str, Callable[[], Any]], repeats: int, told: bool = False
) -> dict[str, list[float]]:
    """Seconds of each contestant, every repeat in another order; `told`: those that the contestants return."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in list(contestants)[:: -1 if repeat % 2 else 1]:
            start = time.perf_counter()
            result = contestants[name]()
            seconds[name].append(result if told else time.perf_counter() - start)
    return seconds


def turn_by_turn(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> list[float]:
    """How many times as long ours took, in each turn."""
    return [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]


def median_and_spread(values: list[float]) -> dict[str, float]:
    """Median, least and most of some values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def command(main: Callable[..., None]) -> None:
    """Runs the function with the options of the command line; a user's mistake ends in a sentence."""
    from lmcore.errors import UserError

    try:
        tyro.cli(main)
    except UserError as error:
        sys.exit(str(error))
