"""Losses and gradient norms of training steps, read from the device without waiting for it."""

from collections.abc import Callable

import torch
from torch import Tensor


class AsyncMetrics:
    """Losses and gradient norms on their way from the device to the host.

    Reading a loss with `loss.item()` waits until the device has computed it; meanwhile no further step is queued, and
    the device idles. So `push` leaves a step's scalars where they are, `start` begins to copy them, and `read`, a step
    later, waits for that copy alone: the step in between keeps the device busy.
    """

    def __init__(self, mean: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        self.mean = mean  # over the ranks
        self.pushed: list[tuple[int, float, Tensor, Tensor]] = []
        self.steps: list[tuple[int, float]] = []
        self.values: Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def push(self, step: int, lr: float, loss: Tensor, norm: Tensor) -> None:
        """Adds the scalars of a step; nothing is copied yet."""
        self.pushed.append((step, lr, loss, norm))

    def start(self) -> None:
        """Begins to copy everything pushed since the last start; an earlier copy must have been read."""
        if not self.pushed:
            return
        self.steps = [(step, lr) for step, lr, _, _ in self.pushed]
        values = torch.stack([torch.stack((loss.float(), norm.float())) for _, _, loss, norm in self.pushed])
        self.values = self.mean(values.double())  # exact: a sum depends neither on its order nor on how many go at once
        self.pushed = []
        if self.values.is_cuda:
            on_device, self.values = self.values, torch.empty(self.values.shape, dtype=torch.float64, pin_memory=True)
            self.values.copy_(on_device, non_blocking=True)
            self.copied = torch.cuda.current_stream(on_device.device).record_event()

    def read(self) -> list[tuple[int, float, float, float]]:
        """(step, lr, loss, norm) of the copy that was begun, once it has arrived; none if there is no copy."""
        if self.values is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        pairs = zip(self.steps, self.values.tolist(), strict=True)
        self.values = self.copied = None
        return [(step, lr, loss, norm) for (step, lr), (loss, norm) in pairs]


class Diverged(Exception):
    """A loss or a gradient norm was not finite."""

    def __init__(self, step: int, learning_rate: float, what: str):
        super().__init__(f"The {what} was not finite at step {step}, learning rate {learning_rate:.3g}.")
        self.step, self.learning_rate = step, learning_rate
