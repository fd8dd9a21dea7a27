"""Exercises of notebook 02: the optimizer, the schedule, batches, checkpoints and the loop."""

import io
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmcore.optimizer import EagerOptimizer, with_gradient
from workbook.exercises.exercise import normal


def adamw_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, lr: float, wd: float) -> tuple[Tensor, ...]:
    """Parameter and moments after step t (from 1), with betas (0.9, 0.95) and eps 1e-8; the weights decay last."""
    m = 0.9 * m + 0.1 * grad
    v = 0.95 * v + 0.05 * grad.square()
    rate = lr * math.sqrt(1 - 0.95**t) / (1 - 0.9**t)
    p = p - rate * m / (v.sqrt() + 1e-8)
    return p - lr * wd * p, m, v


def clip_gradients(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """The gradients scaled so that their joint l2 norm is at most `largest`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = min(1.0, float(largest / (norm + 1e-6)))
    return [gradient * scale for gradient in gradients]


def windows(x: np.ndarray, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 of (batch, context), of the windows that begin at `starts`."""
    places = np.array(starts)[:, None] + np.arange(context)
    return torch.tensor(x[places].astype(np.int64)), torch.tensor(x[places + 1].astype(np.int64))


class _Momentum(EagerOptimizer):
    """Gradient descent with momentum. PyTorch's own would first import its compiler: seconds."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in with_gradient(self.param_groups[0]):
            self.state[p]["m"] = 0.9 * self.state[p].get("m", 0.0) + p.grad
            p -= self.param_groups[0]["lr"] * self.state[p]["m"]


def _resumed(solution: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """A model after two steps, a checkpoint of `solution` = (save, load), and two more steps by new objects."""
    save, load = solution

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, _Momentum(model.parameters())

    first, second, file = new(), new(), io.BytesIO()
    train_loop(*first, [(x, y)] * 2)
    save(*first, 2, file)
    file.seek(0)
    step = load(file, *second)
    train_loop(*second, [(x, y)] * 2)
    return {"step": step} | dict(second[0].state_dict())


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, file: Any) -> None:
    """Writes what a run needs to resume to a path or a binary file."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)


def load_checkpoint(file: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restores model and optimizer, and returns the step."""
    kept = torch.load(file, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return kept["step"]


def _linear_problem() -> list[tuple]:
    model = nn.Linear(2, 1)
    model.load_state_dict({"weight": normal(1, 2), "bias": normal(1)})
    return [(model, _Momentum(model.parameters()), [(normal(4, 2), normal(4, 1)) for _ in range(5)])]


def train_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> list[float]:
    """The mean squared error of each batch before the update on it."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
