"""What a line of metrics says of the steps since the one before, read from the device without waiting for it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lmcore.accounting import training_flops
from lmcore.config import TrainConfig
from lmcore.device import device_name, peak_flops


class AsyncMetrics:
    """Losses and gradient norms on their way from the device to the host.

    Reading a loss with `loss.item()` waits until the device has computed it; meanwhile no further step is queued, and
    the device idles. So `push` leaves a step's scalars where they are, `start` begins to copy them, and `read`, a step
    later, waits for that copy alone: the step in between keeps the device busy.
    """

    def __init__(self, mean: Callable[[Tensor], Tensor] = lambda values: values, skips: bool = False) -> None:
        self.mean, self.skips = mean, skips  # over the ranks; loss scaling skips a step whose norm is not finite
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
        values = values if values.is_cuda else values.cpu()  # Metal has no float64
        self.values = self.mean(values.double())  # exact: a sum depends neither on its order nor on how many go at once
        self.pushed = []
        if self.values.is_cuda:
            on_device, self.values = self.values, torch.empty(self.values.shape, dtype=torch.float64, pin_memory=True)
            self.values.copy_(on_device, non_blocking=True)
            self.copied = torch.cuda.current_stream(on_device.device).record_event()

    def read(self) -> list[tuple[int, float, float, float]]:
        """(step, lr, loss, norm) of the copy that was begun, once it has arrived; none if there is no copy.

        Raises `Diverged` at the first that is not finite.
        """
        if self.values is None:
            return []
        if self.copied is not None:
            self.copied.synchronize()
        pairs = zip(self.steps, self.values.tolist(), strict=True)
        self.values = self.copied = None
        steps = [(step, lr, loss, norm) for (step, lr), (loss, norm) in pairs]
        for step, lr, loss, norm in steps:
            if not math.isfinite(loss):
                raise Diverged(step, lr, "loss")
            if not math.isfinite(norm) and not self.skips:
                raise Diverged(step, lr, "gradient norm")
        return steps


class Meter:
    """Measures training steps alone: their seconds, and the most memory that the device has held in one."""

    def __init__(self, config: TrainConfig, device: torch.device, ranks: int = 1):
        self.tokens_per_step, self.device = config.tokens_per_step, device
        self.flops_per_step = training_flops(config.model, config.batch_size)
        peak = peak_flops(device_name(device), config.precision)
        self.peak_flops = ranks * peak if peak else None
        self.peak_bytes: int | None = None  # of all steps: a CUDA graph's memory counts only when it is captured
        self.seconds, self.steps = 0.0, 0  # since the last line

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A block that belongs to training steps."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def line(self, step: int, losses: list[float], lr: float, norm: float) -> dict[str, Any]:
        """The metrics line after `step`, with its rate and norm; `mfu` leaves a teacher out. Seconds begin anew."""
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))
        rate = self.steps / self.seconds if self.steps else 0.0
        self.seconds, self.steps = 0.0, 0
        return {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "train_loss": math.fsum(losses) / len(losses),
            "lr": lr,
            "grad_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": rate * self.tokens_per_step,
            "mfu": rate * self.flops_per_step / self.peak_flops if self.peak_flops else None,
            "peak_memory_bytes": self.peak_bytes,
        }


class Diverged(Exception):
    """A loss or a gradient norm was not finite."""

    def __init__(self, step: int, learning_rate: float, what: str):
        super().__init__(f"The {what} was not finite at step {step}, learning rate {learning_rate:.3g}.")
        self.step, self.learning_rate = step, learning_rate
