"""The result of holding one computation against another."""

from dataclasses import dataclass

from torch import Tensor

from lmcore.errors import require
from lmcore.workbook.report.answers import format_significant, scientific


@dataclass(frozen=True)
class Agreement:
    """How far `ours` is from a reference; prints the same on every machine, and says the number in `sentence`."""

    reference: str
    difference: float
    """Largest |difference|, divided by the largest |value| of the reference where that is above 1."""
    tolerance: float
    shape: tuple[int, ...]

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; a difference that is not a number is not."""
        return self.difference <= self.tolerance

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape)) or "scalar"
        return f"{self.reference}: max |difference| below {self.tolerance:g}: {self.holds} (shape {shape})"

    @property
    def sentence(self) -> str:
        """The measurement in words, for an answer."""
        if not self.holds:
            return f"It does **not** agree with {self.reference}: the largest difference is {self.difference:.2g}."
        if self.difference == 0:
            return f"It agrees with {self.reference} exactly."
        small = self.difference < 1e-3
        difference = scientific(self.difference, 2) if small else format_significant(self.difference, 2)
        return (
            f"It agrees with {self.reference} within {scientific(self.tolerance, 1)}: the largest difference is "
            f"{difference}."
        )


def agreement(ours: Tensor, theirs: Tensor, reference: str, tolerance: float = 1e-5) -> Agreement:
    """Compares two tensors of one shape; `reference` names where `theirs` comes from."""
    require(ours.shape == theirs.shape, f"The shapes {tuple(ours.shape)} and {tuple(theirs.shape)} differ.")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    scale = max(1.0, theirs.abs().max().item())
    return Agreement(reference, (ours - theirs).abs().max().item() / scale, tolerance, tuple(ours.shape))
