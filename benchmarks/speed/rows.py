"""A cell is one piece of work; a row of the results file is how one contestant did it."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmcore.profiling.kernels.measuring import Contestant, Result, race

CUDNN, FLASH = "SDPA cuDNN", "SDPA FlashAttention"
OURS = "lmcore fused"
FAST_PATH = (OURS, "lmcore flash", "+ one CUDA graph")
"""Our own contestants; whatever else of ours takes part is there for comparison."""

SECONDS_OF_A_MEMORY_ROW = 0.2
"""Times are a by-product where memory is what is asked for."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One piece of work, which several contestants do in one process.

    `measure` names the function that does it, `module:function`; it gets the cell and a `Conditions` and returns rows.
    """

    row: str
    group: str
    work: str
    measure: str
    settings: dict[str, Any]
    estimate: float
    """Seconds that the cell takes on an H200, with what is compiled for it."""


@dataclass(frozen=True)
class Conditions:
    """Under which a cell is measured: where, how long, and what the device can do at best."""

    device: str
    toy: bool
    """Sizes for a test of the command: nothing is compiled, and the times mean nothing."""
    seconds: float
    """Time that the turns may take, building and compiling excluded."""
    ceilings: dict[str, float]

    def compiled(self, function: Callable) -> Callable:
        """torch.compile for these very shapes; at toy sizes the function as it is, since compiling takes seconds."""
        return function if self.toy else torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class Work:
    """What the contestants of a cell do, and in which terms their times are told."""

    builders: Mapping[str, Callable[[], Contestant]]
    amount: float
    """What one call does, of `rate_unit` times seconds: TFLOP, GB or tokens."""
    rate_unit: str
    ideal: float | None
    """Seconds of a call at the whole of `share_of`."""
    share_of: str
    alone: bool = True
    reference: Sequence[Tensor] | None = None
    part: Callable[[Tensor], Tensor] = lambda x: x
    """What is compared with the reference."""

    def rows(self, cell: Cell, conditions: Conditions) -> list[dict[str, Any]]:
        """Lets the contestants take turns."""
        device, seconds = torch.device(conditions.device), conditions.seconds
        results = race(self.builders, device, seconds, self.alone, self.reference, self.part)
        return [self.row(cell, name, result) for name, result in results.items()]

    def row(self, cell: Cell, contestant: str, result: Result) -> dict[str, Any]:
        """Times are in ms: the median, the first and the last decile; bytes in bytes; a share is from 0 to 1."""
        found = blank_row(cell, contestant, result.outcome, result.reason) | {"notes": result.notes}
        if not result.seconds:
            return found | {"notes": {}}
        median = statistics.median(result.seconds)
        deciles = statistics.quantiles(result.seconds, n=10, method="inclusive")
        return found | {
            "median": median * 1e3,
            "low": deciles[0] * 1e3,
            "high": deciles[-1] * 1e3,
            "repeats": len(result.seconds),
            "peak_bytes": result.peak_bytes,
            "rate": self.amount / median,
            "rate_unit": self.rate_unit,
            "share": None if self.ideal is None else self.ideal / median,
            "share_of": self.share_of,
        }


def blank_row(cell: Cell, contestant: str, outcome: str, reason: str | None) -> dict[str, Any]:
    """The row of a contestant without a time."""
    head = {name: getattr(cell, name) for name in ("row", "group", "work", "settings")}
    head |= {"contestant": contestant, "ours": contestant in FAST_PATH, "unit": "ms"}
    empty = dict.fromkeys(("median", "low", "high")) | {"repeats": 0}
    empty |= dict.fromkeys(("peak_bytes", "rate", "rate_unit", "share", "share_of"))
    return head | empty | {"outcome": outcome, "reason": reason, "notes": {}}
