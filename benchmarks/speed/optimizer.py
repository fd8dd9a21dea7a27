"""AdamW over many float32 parameters: bytes moved per second against a copy's."""

from typing import Any

import torch
from torch import Tensor, nn

from lmcore.optimizer import AdamW

from .measuring import Built, Contestant, Race
from .rows import Cell, Conditions, Row
from .steps import OPTIMIZER

BYTES_PER_PARAMETER = 28
"""Parameter, gradient and both moments are read, all but the gradient are written; 4 bytes each."""


def shapes(settings: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the parameters: those of a model's blocks, matrices and gains."""
    d, f = settings["d_model"], settings["d_ff"]
    return [(d, d)] * 4 * settings["blocks"] + [(f, d)] * 3 * settings["blocks"] + [(d,)] * 2 * settings["blocks"]


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times one update of all parameters, clipping left out."""
    bench = Bench(cell, conditions)
    moved = BYTES_PER_PARAMETER * bench.num_parameters
    ceiling = conditions.ceilings["copy_bytes_per_second"]
    race = Race(
        cell,
        conditions,
        [Contestant("torch fused", bench.torch_fused), Contestant("lmcore fused", bench.fused, ours=True)],
        reference=bench.reference(),
        amount=moved / 1e9,
        rate_unit="GB/s",
        share=lambda seconds: moved / seconds / ceiling,
        share_of="measured copy",
    )
    return race.rows()


class Bench:
    """The parameters with gradients, anew for everyone who updates them."""

    def __init__(self, cell: Cell, conditions: Conditions):
        self.shapes, self.device = shapes(cell.settings), torch.device(conditions.device)
        self.num_parameters = sum(torch.Size(shape).numel() for shape in self.shapes)

    def parameters(self, shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
        """The first of the parameters are the same whatever follows."""
        torch.manual_seed(0)
        made = []
        for shape in shapes:
            p = nn.Parameter(torch.randn(shape, device=self.device))
            p.grad = torch.randn(shape, device=self.device) / 100
            made.append(p)
        return made

    def reference(self) -> Tensor:
        """By how much three updates of the definition change the first parameter, in float64."""
        (p,) = self.parameters(self.shapes[:1])
        wide = nn.Parameter(p.detach().double())
        wide.grad = p.grad.double()
        optimizer = AdamW([wide], **OPTIMIZER)
        for _ in range(3):
            optimizer.step()
        return (wide - p.double()).detach()

    def torch_fused(self) -> Built:
        return self._built(lambda parameters: torch.optim.AdamW(parameters, **OPTIMIZER, fused=True))

    def fused(self) -> Built:
        from lmcore.kernels.adamw import FusedAdamW

        return self._built(lambda parameters: FusedAdamW(parameters, **OPTIMIZER))

    def _built(self, make: Any) -> Built:
        parameters = self.parameters(self.shapes)
        before = parameters[0].detach().double()
        optimizer = make(parameters)
        for _ in range(3):
            optimizer.step()
        return Built(optimizer.step, results=parameters[0].detach().double() - before)
