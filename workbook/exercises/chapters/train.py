"""Exercises of notebook 02: the optimizer, the schedule, batches, checkpoints and the loop."""

import io
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmcore.checkpoint import load_checkpoint, save_checkpoint
from lmcore.optimizer import get_lr_cosine_schedule
from workbook.exercises.exercise import exercise, normal

here = partial(exercise, notebook="02_train")


def adamw_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, lr: float, wd: float) -> tuple[Tensor, ...]:
    """Parameter and moments after step t (from 1), with betas (0.9, 0.95) and eps 1e-8."""
    return _adamw(p, grad, m, v, t, lr, wd)


def _adamw(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, lr: float, wd: float, **slip: Any) -> tuple:
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad.square()
    rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if slip.get("corrected", True) else lr
    root = v.sqrt() + eps if slip.get("root", True) else v + eps
    p = p - rate * m / root
    return p * (1 - lr * wd) if slip.get("decay", True) else p, m, v


here(
    "adamw_step",
    adamw_step,
    lambda: [
        (normal(3), normal(3), torch.zeros(3), torch.zeros(3), 1, 0.1, 0.5),
        (normal(4), normal(4), normal(4), normal(4).square(), 7, 0.01, 0.0),
    ],
    mistakes={
        "The first steps are too small: the moments begin at zero.": partial(_adamw, corrected=False),
        "The second moment is used as it is; it is of squares.": partial(_adamw, root=False),
        "The weights do not decay.": partial(_adamw, decay=False),
        "The decay went through the moments, as in L2 regularization; AdamW keeps it apart.": (
            lambda p, grad, m, v, t, lr, wd: _adamw(p, grad + wd * p, m, v, t, lr, 0.0)
        ),
    },
    avoid=("AdamW", "adamw", "Adam", "adam"),
)
here(
    "cosine_schedule",
    get_lr_cosine_schedule,
    [(it, 1.0, 0.1, 4, 20) for it in (0, 1, 4, 5, 12, 20, 25)],
    mistakes={
        "The warm-up begins above zero: what is the rate at step 0?": lambda it, *rest: get_lr_cosine_schedule(
            it + 1 if it < rest[2] else it, *rest
        ),
        "After the cosine the rate should stay at its minimum.": lambda it, high, low, warm, end: (
            get_lr_cosine_schedule(it, high, low, warm, end) if it <= end else 0.0
        ),
        "The cosine starts at step 0; it begins where the warm-up ends.": lambda it, high, low, warm, end: (
            low + 0.5 * (1 + math.cos(math.pi * it / end)) * (high - low)
            if warm <= it <= end
            else get_lr_cosine_schedule(it, high, low, warm, end)
        ),
    },
)


def clip_gradients(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """The gradients scaled so that their joint l2 norm is at most `largest`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * min(1.0, float(largest / (norm + 1e-6))) for gradient in gradients]


here(
    "clip_gradients",
    clip_gradients,
    lambda: [([normal(3), normal(2, 2)], 1.0), ([normal(2, scale=0.01)], 1.0)],
    mistakes={
        "Each tensor is clipped alone; the norm is that of all together.": lambda gradients, largest: [
            clip_gradients([gradient], largest)[0] for gradient in gradients
        ],
        "Small gradients are scaled up.": lambda gradients, largest: [
            gradient * float(largest / (torch.cat([g.flatten() for g in gradients]).norm() + 1e-6))
            for gradient in gradients
        ],
        "Single numbers are cut; the direction of the gradient should stay.": lambda gradients, largest: [
            gradient.clamp(-largest, largest) for gradient in gradients
        ],
    },
    avoid=("clip_grad_norm_", "clip_grads_with_norm_"),
)


def windows(x: np.ndarray, starts: list[int], context: int, ahead: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (batch, context), of the windows that begin at `starts`."""
    inputs = torch.tensor(np.stack([x[start : start + context] for start in starts]).astype(np.int64))
    targets = torch.tensor(np.stack([x[start + ahead : start + ahead + context] for start in starts]).astype(np.int64))
    return inputs, targets


here(
    "windows",
    windows,
    [(np.arange(10, 40, dtype=np.uint16), [3, 0, 7], 5)],
    mistakes={
        "Inputs and targets are the same: a model would only have to copy.": partial(windows, ahead=0),
        "The targets are two tokens ahead.": partial(windows, ahead=2),
        "Ids of 16 bits cannot be used as indices by PyTorch: int64 is asked for.": lambda x, starts, context: tuple(
            part.to(torch.int32) for part in windows(x, starts, context)
        ),
    },
)
here(
    "number_of_windows",
    1000 - 64,
    mistakes={
        "The last window has no target for its last token.": 1000 - 64 + 1,
        "One window is forgotten: a start of 0 counts.": 1000 - 64 - 1,
        "Windows may overlap.": 1000 // 64,
    },
    tolerance=1e-9,
)


def _resumed(solution: Any) -> dict[str, Any]:
    """A model after two steps, a checkpoint of `solution` = (save, load), and two more steps by new objects."""
    save, load = solution
    x, y = normal(8, 3), normal(8, 1)

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    model, optimizer = new()
    steps(model, optimizer)
    file = io.BytesIO()
    save(model, optimizer, 2, file)
    file.seek(0)
    model, optimizer = new()
    step = load(file, model, optimizer)
    steps(model, optimizer)
    return {"step": step} | dict(model.state_dict())


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, file: Any) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)


def _load(file: Any, model: nn.Module, optimizer: torch.optim.Optimizer, state: bool = True, step: bool = True) -> Any:
    kept = torch.load(file)
    model.load_state_dict(kept["model"])
    if state:
        optimizer.load_state_dict(kept["optimizer"])
    return kept["step"] if step else None


here(
    "checkpoint",
    (save_checkpoint, load_checkpoint),
    mistakes={
        "The run goes on another way: the optimizer has a memory, too.": (_save, partial(_load, state=False)),
        "The step is lost: `load_checkpoint` returns it.": (_save, partial(_load, step=False)),
    },
    use=_resumed,
)


def train_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> list[float]:
    """The mean squared error of each batch before the update on it."""
    return _train(model, optimizer, batches)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list, **slip: bool) -> list[float]:
    losses = []
    for x, y in batches:
        loss = (model(x) - y).square().mean()
        if slip.get("zero", True):
            optimizer.zero_grad()
        if slip.get("early"):
            optimizer.step()
        loss.backward()
        if not slip.get("early"):
            optimizer.step()
        losses.append((model(x) - y).square().mean().item() if slip.get("after") else loss.item())
    return losses


def _linear_problem() -> list[tuple]:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(normal(*p.shape))
    return [(model, torch.optim.SGD(model.parameters(), lr=0.1), [(normal(4, 2), normal(4, 1)) for _ in range(5)])]


here(
    "train_loop",
    train_loop,
    _linear_problem,
    mistakes={
        "The gradients of earlier batches are still in it.": partial(_train, zero=False),
        "The update comes before the gradient of its batch.": partial(_train, early=True),
        "The loss is that after the update.": partial(_train, after=True),
    },
)
