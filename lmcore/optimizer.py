"""Optimizers, learning-rate schedule and gradient clipping, from scratch (CSE599-O A1 sections 4.2 to 4.5)."""

import math
from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.config import OptimizerConfig


class EagerOptimizer(Optimizer):
    """PyTorch's optimizer, without what it does for `torch.compile`."""

    # as PyTorch wraps them, their first call would import the compiler: two seconds in each process
    add_param_group, zero_grad = unwrap(Optimizer.add_param_group), unwrap(Optimizer.zero_grad)
    state_dict, load_state_dict = unwrap(Optimizer.state_dict), unwrap(Optimizer.load_state_dict)


class SGD(EagerOptimizer):
    """Gradient descent whose step shrinks as lr / sqrt(t + 1), t from 0 (section 4.2, equation 20)."""

    def __init__(self, params: Iterable, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in with_gradient(group):
                t = self.state[p].get("t", 0)
                p.add_(p.grad, alpha=-group["lr"] / math.sqrt(t + 1))
                self.state[p]["t"] = t + 1
        return loss


class AdamW(EagerOptimizer):
    """Adam with decoupled weight decay; weights decay after their update, as in Algorithm 1 of CSE599-O and CS336 2025.

    The paper (Loshchilov and Hutter 2019), PyTorch and CS336 2026 decay before the update. The two differ by
    lr * weight_decay * update in each step.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        further: dict[str, Any] | None = None,  # what the groups of a subclass hold besides
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | (further or {}))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in with_gradient(group):
                adamw_update(p, self.state[p], group)
        return loss


def adamw_update(p: Tensor, state: dict, group: dict) -> None:
    """Lines 7 to 11 of CSE599-O's Algorithm 1 for one parameter; `state` keeps t and the moments m and v."""
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    (beta1, beta2), lr = group["betas"], group["lr"]
    m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
    lr_t = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-lr_t)
    p.mul_(1 - lr * group["weight_decay"])


def with_gradient(group: dict) -> list[Any]:
    """The parameters of a group that have a gradient."""
    return [p for p in group["params"] if p.grad is not None]


class Muon(AdamW):
    """Momentum whose matrix updates are orthogonalized (Jordan et al. 2024), with AdamW for everything else.

    Groups with `orthogonalize=True` hold two-dimensional weights of hidden layers. Their update is scaled by
    0.2 * sqrt(max(rows, columns)), so that it is as large as AdamW's and shares its learning rate and weight decay
    (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2). They decay before it, AdamW's weights after.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, {"momentum": momentum, "orthogonalize": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = with_gradient(group)
            if group["orthogonalize"]:
                for shape in {p.shape: None for p in parameters}:
                    matrices = [p for p in parameters if p.shape == shape]
                    buffers = [momentum_buffer(p, self.state[p]) for p in matrices]
                    directions = torch.stack([p.grad for p in matrices])
                    muon_update(matrices, directions, buffers, group["momentum"], *muon_scalars(group, shape))
            else:
                for p in parameters:
                    adamw_update(p, self.state[p], group)
        return loss


def momentum_buffer(p: Tensor, state: dict) -> Tensor:
    """Muon's only state of a parameter, zeros at first."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(p)
    return state["momentum_buffer"]


def muon_scalars(group: dict, shape: torch.Size) -> tuple[float, float]:
    """What weights are multiplied by, and what their update is."""
    return 1 - group["lr"] * group["weight_decay"], group["lr"] * 0.2 * math.sqrt(max(shape))


def muon_update(
    matrices: list[Any], directions: Tensor, buffers: list[Tensor], momentum: float, keep: Any, step: Any
) -> None:
    """Updates matrices of one shape, which one batched matmul serves, by their stacked gradients, which are written
    over. `keep` and `step` are the `muon_scalars`, numbers or tensors."""
    each = list(directions.unbind())
    torch._foreach_lerp_(buffers, each, 1 - momentum)
    torch._foreach_lerp_(each, buffers, momentum)  # Nesterov's look ahead
    torch._foreach_mul_(matrices, keep)
    torch._foreach_sub_(matrices, list((orthogonalize(directions) * step).unbind()))


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearest (semi-)orthogonal matrices, roughly: singular values of (..., rows, columns) are driven to about 1.

    A quintic Newton-Schulz iteration, x -> a x + b x^3 + c x^5 on the singular values, whose coefficients are tuned
    for speed and leave values between about 0.7 and 1.2 (Jordan et al. 2024). Runs in bfloat16 on CUDA.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (matrices.bfloat16() if matrices.is_cuda else matrices).reshape(-1, *matrices.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x.mT @ x if tall else x @ x.mT  # the smaller one
        # 1 * copies by a kernel: in a CUDA graph a memory copy, as `baddbmm` makes it, has no priority and waits
        factor = (1 * gram).baddbmm_(gram, gram, beta=b, alpha=c)
        x = (1 * x).baddbmm_(*((x, factor) if tall else (factor, x)), beta=a)  # a x + (b gram + c gram²) x
    return x.to(matrices.dtype).view_as(matrices)


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    make: Callable[..., Optimizer] = lambda groups, kind, **settings: kind(groups, **settings),
) -> Optimizer:
    """The configured optimizer over `model`: weight decay on matrices, on the weights of norms only if so configured.

    `make` makes it of its parameter groups, the class (SGD, AdamW, Muon) and what that takes.
    """
    if config.name == "sgd":
        return make(list(model.parameters()), SGD, lr=config.learning_rate)
    norm_decay = config.weight_decay if config.decay_norms else 0.0
    hidden: list[Any] = []
    if config.name == "muon":
        hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
    ids = {id(p) for p in hidden}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in ids]
    groups: list[dict[str, Any]] = [
        {"params": hidden, "weight_decay": config.weight_decay, "orthogonalize": True},
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": norm_decay},
    ]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    return make([group for group in groups if group["params"]], Muon if config.name == "muon" else AdamW, **settings)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Gives every parameter group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def get_lr_cosine_schedule(
    it: int, max_learning_rate: float, min_learning_rate: float, warmup_iters: int, cosine_cycle_iters: int
) -> float:
    """Learning rate at iteration `it` (from 0): linear warm-up, half a cosine, then the minimum (section 4.4)."""
    if it < warmup_iters:
        return max_learning_rate * it / warmup_iters
    if it > cosine_cycle_iters or cosine_cycle_iters <= warmup_iters:
        return min_learning_rate
    progress = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    return min_learning_rate + 0.5 * (1 + math.cos(math.pi * progress)) * (max_learning_rate - min_learning_rate)


@torch.no_grad()
def gradient_clipping(parameters: Iterable[nn.Parameter], max_l2_norm: float, eps: float = 1e-6) -> Tensor:
    """Scales all gradients in place so that their joint l2 norm is at most `max_l2_norm` (section 4.5).

    Returns the norm before clipping, a scalar tensor on the gradients' device: nothing waits for the GPU. A norm that
    is not finite leaves gradients that are not finite.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = gradient_norm(gradients)
    scale = torch.clamp(max_l2_norm / (norm + eps), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Joint l2 norm of several tensors, as a scalar tensor."""
    return torch.stack([torch.linalg.vector_norm(g) for g in gradients]).norm()
