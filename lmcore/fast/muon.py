"""Muon in one pass that a CUDA graph can hold: `lmcore.optimizer.Muon` as `FusedAdamW` has AdamW."""

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from lmcore.fast.kernels.adamw import NOTHING, FusedAdamW, Settings, Slot
from lmcore.optimizer import orthogonalize

MATRICES = -1
"""The part of what is orthogonalized: `FusedAdamW` measures its gradients, and leaves it alone."""


class Stack:
    """Matrices of one shape and group, whose update is one batched matmul after the other.

    `scalars` on the device are 1 - lr * weight_decay and lr, times what makes the update as large as AdamW's.
    """

    def __init__(self, group: dict, slots: list[Slot]):
        self.group, self.momentum = group, group["momentum"]
        self.matrices, self.gradients, self.buffers = ([slot[i] for slot in slots] for i in range(3))
        self.copies = [slot.copy for slot in slots if slot.copy is not None]
        self.scale = 0.2 * math.sqrt(max(self.matrices[0].shape))
        self.scalars = torch.zeros(2, device=self.matrices[0].device)

    def send(self) -> None:
        """Puts the scalars of this step on the device, without waiting for it."""
        lr = self.group["lr"]
        scalars = torch.tensor((1 - lr * self.group["weight_decay"], lr * self.scale))
        self.scalars.copy_(scalars.pin_memory() if self.scalars.is_cuda else scalars, non_blocking=True)

    def update(self, clip: Tensor | float) -> None:
        """`lmcore.optimizer.muon_update`, of gradients times `clip`, and the compute weights."""
        keep, step = self.scalars.unbind()
        directions = torch.stack(self.gradients).float() * clip
        each = list(directions.unbind())
        torch._foreach_lerp_(self.buffers, each, 1 - self.momentum)
        torch._foreach_lerp_(each, self.buffers, self.momentum)  # Nesterov's look ahead
        torch._foreach_mul_(self.matrices, keep)
        torch._foreach_sub_(self.matrices, list((orthogonalize(directions) * step).unbind()))
        if self.copies:
            torch._foreach_copy_(self.copies, self.matrices)


class FusedMuon(FusedAdamW):
    """`lmcore.optimizer.Muon` and the clipping of gradients without a wait for the host; states are interchangeable.

    Groups with `orthogonalize=True` hold matrices, which are updated by batched matmuls; all others are `FusedAdamW`'s.
    For parameters, gradients and `norm` see there; `apply` takes no single parts.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        max_grad_norm: float | None = None,
    ):
        self._stacks: list[Stack] = []
        super().__init__(params, lr, betas, eps, weight_decay, max_grad_norm, momentum=momentum, orthogonalize=False)

    def bind(
        self,
        gradients: Mapping[nn.Parameter, Tensor],
        compute_weights: Mapping[nn.Parameter, Tensor] | None = None,
        parts: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        """See `FusedAdamW.bind`."""
        self._orthogonal = {p for group in self.param_groups if group["orthogonalize"] for p in group["params"]}
        super().bind(gradients, compute_weights, dict(parts or {}) | dict.fromkeys(self._orthogonal, MATRICES))

    @torch.no_grad()
    def prepare(self) -> None:
        """See `FusedAdamW.prepare`."""
        super().prepare()
        for stack in self._stacks:
            stack.send()

    @torch.no_grad()
    def apply(self, parts: Collection[int] | None = None) -> None:
        """Clipping by the norm, and the update of all parameters."""
        super().apply(set(self._table.parts) - {MATRICES})
        clip = 1.0 if self.max_grad_norm is None else torch.clamp(self.max_grad_norm / (self.norm + 1e-6), max=1.0)
        for stack in self._stacks:
            stack.update(clip)

    def warm_up(self) -> None:
        """Builds the table and compiles the kernels for the present gradients; changes nothing but the norm."""
        self._build()
        self.idle()
        self.measure()
        super().apply(set(self._table.parts) - {MATRICES})
        for stack in self._stacks:
            orthogonalize(torch.zeros_like(torch.stack(stack.buffers)))

    def _build(self) -> list[tuple[dict, Tensor, Tensor]]:
        before, found = self._addresses, super()._build()
        if before is not self._addresses:  # another table, so other stacks
            stacks: dict[tuple, list[Slot]] = {}
            for group, p, gradient in found:
                if p in self._orthogonal:
                    stacks.setdefault((id(group), p.shape), []).append(self._slot(p, gradient))
            groups = {id(group): group for group in self.param_groups}
            self._stacks = [Stack(groups[number], slots) for (number, _), slots in stacks.items()]
        return found

    def _count(self, p: Tensor) -> int:
        if p not in self._orthogonal:
            return super()._count(p)
        self.state[p].update(self._moments_of(p))
        return 0

    def _settings(self, group: dict, t: int) -> Settings:
        return NOTHING if group["orthogonalize"] else super()._settings(group, t)

    def _moments_of(self, p: Tensor, names: tuple[str, ...] = ("m", "v")) -> dict[str, Tensor]:
        return super()._moments_of(p, ("momentum_buffer",) if p in self._orthogonal else names)

    def _slot(self, p: Tensor, gradient: Tensor) -> Slot:
        if p not in self._orthogonal:
            return super()._slot(p, gradient)
        buffer = self._moments_of(p)["momentum_buffer"]
        return Slot(p.detach(), gradient.detach(), buffer, buffer, self._compute_weights.get(p))
