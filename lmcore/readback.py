"""Numbers on their way from the device to the host, read without making the device wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepValues:
    """What one training step reports: its number, learning rate, loss (nats per token) and gradient norm."""

    step: int
    lr: float
    loss: float
    norm: float


class Readback:
    """Losses and gradient norms of training steps, still on the device.

    `push` takes those of a step; `start` begins to copy what was pushed so far; `read` waits for that copy alone, so
    that a step queued in between keeps the device busy meanwhile.
    """

    def __init__(self) -> None:
        self.pushed: list[tuple[int, float, Tensor, Tensor]] = []
        self.steps: Sequence[tuple[int, float]] = ()
        self.values: Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def push(self, step: int, lr: float, loss: Tensor, norm: Tensor) -> None:
        """Adds the scalars of a step; nothing is copied yet."""
        self.pushed.append((step, lr, loss, norm))

    def start(self) -> None:
        """Begins to copy everything pushed since the last start; a copy under way must have been read."""
        if not self.pushed:
            return
        self.steps = [(step, lr) for step, lr, _, _ in self.pushed]
        values = torch.stack([torch.stack((loss.float(), norm.float())) for _, _, loss, norm in self.pushed])
        self.pushed = []
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.copied = torch.cuda.current_stream(values.device).record_event()
        else:
            self.values = values

    def read(self) -> list[StepValues]:
        """The values of the copy under way, once they are there; none if there is no copy."""
        if self.values is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        pairs = zip(self.steps, self.values.tolist(), strict=True)
        self.values = self.copied = None
        return [StepValues(step, lr, loss, norm) for (step, lr), (loss, norm) in pairs]
