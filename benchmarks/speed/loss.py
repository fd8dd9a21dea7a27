"""The output layer and its cross-entropy as one: the loss of a batch and the gradients of activations and weights."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .measuring import Built, Contestant, Race, compiled
from .rows import Cell, Conditions, Row

CHECKED_COLUMNS = 64
"""Gradients of so many features are compared."""


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times the loss forward and backward in bf16. Peak memory is all beyond x, weight and targets: gradients too."""
    s, device = cell.settings, torch.device(conditions.device)
    torch.manual_seed(0)
    x = torch.randn(s["rows"], s["d_model"], device=device).bfloat16().requires_grad_()
    weight = (torch.randn(s["vocab_size"], s["d_model"], device=device) / 20).bfloat16().requires_grad_()
    targets = torch.randint(s["vocab_size"], (s["rows"],), device=device)
    flops = 6 * s["rows"] * s["d_model"] * s["vocab_size"]
    ceiling = conditions.ceilings["bf16_flops_per_second"]

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight).float(), targets)

    def contestant(name: str, make: Callable[[], Callable], ours: bool = False) -> Contestant:
        def build() -> Built:
            loss_of = make()

            def run() -> tuple[Tensor, ...]:
                loss = loss_of(x, weight, targets)
                return (loss, *torch.autograd.grad(loss, (x, weight)))

            loss, dx, dw = run()
            return Built(run, results=[loss.detach(), dx[:, :CHECKED_COLUMNS].clone(), dw[:, :CHECKED_COLUMNS].clone()])

        return Contestant(name, build, ours)

    def ours() -> Callable:
        from lmcore.kernels.cross_entropy import linear_cross_entropy

        return linear_cross_entropy

    race = Race(
        cell,
        conditions,
        [
            contestant("eager", lambda: plain),
            contestant("torch.compile", lambda: compiled(plain, conditions)),
            contestant("lmcore fused", ours, ours=True),
        ],
        reference=reference(x.detach(), weight.detach(), targets),
        amount=flops / 1e12,
        rate_unit="TFLOP/s",
        share=lambda seconds: flops / seconds / ceiling,
        share_of="measured matmul",
    )
    return race.rows()


def reference(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> list[Tensor]:
    """Loss and gradients of the first features in float32, by chunks of rows: softmax minus one-hot, by the mean."""
    columns = slice(CHECKED_COLUMNS)
    wide = weight.float()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    dx, dw = [], torch.zeros_like(wide[:, columns])
    for rows, wanted in zip(x.float().split(chunk), targets.split(chunk), strict=True):
        logits = rows @ wide.T
        total += functional.cross_entropy(logits, wanted, reduction="sum").double()
        gradient = logits.softmax(-1)
        gradient[torch.arange(len(rows), device=x.device), wanted] -= 1
        gradient /= len(x)
        dx.append(gradient @ wide[:, columns])
        dw += gradient.T @ rows[:, columns]
    return [total / len(x), torch.cat(dx), dw]
