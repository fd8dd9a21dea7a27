"""What is measured and what comes out: a cell is one piece of work, a row is one contestant's result in it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One piece of work, which several contestants do in one process.

    `measure` names the function that does it, `module:function`; it gets the cell and a `Conditions`.
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
    """Time that the measurement may take, building and compiling excluded."""
    ceilings: dict[str, float]


@dataclass(frozen=True)
class Row:
    """How one contestant did in one cell. Times are in `unit`, bytes in bytes, a share is from 0 to 1."""

    row: str
    group: str
    work: str
    settings: dict[str, Any]
    contestant: str
    ours: bool
    unit: str = "ms"
    median: float | None = None
    low: float | None = None
    high: float | None = None
    """First and last decile of the repeats."""
    repeats: int = 0
    peak_bytes: int | None = None
    """Device memory that the contestant needed at most beyond what was there before; None where it is not counted."""
    rate: float | None = None
    rate_unit: str | None = None
    share: float | None = None
    share_of: str | None = None
    outcome: str = "complete"
    """Or "out of memory", "failed", "absent", with the `reason`."""
    reason: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the results file."""
        return asdict(self)
