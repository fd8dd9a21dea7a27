"""Muon that a CUDA graph can hold: `lmcore.optimizer.Muon` as `FusedAdamW` has AdamW."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lmcore.fast.kernels.adamw import NOTHING, FusedAdamW, Settings, Slot
from lmcore.optimizer import momentum_buffer, muon_scalars, muon_update, orthogonalize


class Stack:
    """Matrices of one shape of the group with this number; their `scalars` (`muon_scalars`) lie on the device."""

    def __init__(self, number: int, momentum: float, slots: list[Slot], buffers: list[Tensor]):
        self.number, self.momentum, self.buffers = number, momentum, buffers
        self.matrices, self.gradients = [slot.p for slot in slots], [slot.gradient for slot in slots]
        self.copies = [slot.copy for slot in slots if slot.copy is not None]
        self.scalars = torch.zeros(2, device=buffers[0].device)

    def send(self, group: dict) -> None:
        """Puts the scalars of this step on the device, without waiting for it."""
        scalars = torch.tensor(muon_scalars(group, self.matrices[0].shape))
        self.scalars.copy_(scalars.pin_memory() if self.scalars.is_cuda else scalars, non_blocking=True)

    def update(self, clip: Tensor | float) -> None:
        """`lmcore.optimizer.muon_update` by the gradients times `clip`, and the compute weights."""
        gradients = torch.stack(self.gradients).float() * clip
        muon_update(self.matrices, gradients, self.buffers, self.momentum, *self.scalars.unbind())
        if self.copies:
            torch._foreach_copy_(self.copies, self.matrices)


class FusedMuon(FusedAdamW):
    """`lmcore.optimizer.Muon` and the clipping of gradients without a wait for the host; states are interchangeable.

    Groups with `orthogonalize=True` hold matrices, which batched matmuls update; all others are `FusedAdamW`'s. For
    parameters, gradients and `norm` see there.
    """

    def __init__(
        self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, momentum: float = 0.95, max_grad_norm: float | None = None,
    ):  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, max_grad_norm, momentum=momentum, orthogonalize=False)
        self._orthogonal = {p for group in self.param_groups if group["orthogonalize"] for p in group["params"]}
        self._stacks: list[Stack] = []

    @torch.no_grad()
    def prepare(self) -> None:
        """See `FusedAdamW.prepare`."""
        super().prepare()
        for stack in self._stacks:
            stack.send(self.param_groups[stack.number])  # loading a state makes new groups

    @torch.no_grad()
    def apply(self) -> None:
        """See `FusedAdamW.apply`."""
        super().apply()
        clip = 1.0 if self.max_grad_norm is None else torch.clamp(self.max_grad_norm / (self.norm + 1e-6), max=1.0)
        for stack in self._stacks:
            stack.update(clip)

    def warm_up(self) -> None:
        """See `FusedAdamW.warm_up`."""
        super().warm_up()
        for stack in self._stacks:
            orthogonalize(torch.zeros_like(torch.stack(stack.buffers)))

    def _build(self) -> list[tuple[dict, Tensor, Tensor]]:
        before, found = self._addresses, super()._build()
        if before is not self._addresses:  # another table, so other stacks
            numbers = {id(group): number for number, group in enumerate(self.param_groups)}
            stacks: dict[tuple, tuple[list[Slot], list[Tensor]]] = {}
            for group, p, gradient in found:
                if p in self._orthogonal:
                    key = numbers[id(group)], group["momentum"], p.shape
                    slots, buffers = stacks.setdefault(key, ([], []))
                    slots.append(self._slot(p, gradient))
                    buffers += self._moments_of(p).values()
            self._stacks = [Stack(*key[:2], *stack) for key, stack in stacks.items()]
        return found

    def _count(self, p: Tensor) -> int:
        if p not in self._orthogonal:
            return super()._count(p)
        self.state[p].update(self._moments_of(p))
        return 0

    def _settings(self, group: dict, t: int) -> Settings:
        return NOTHING if group["orthogonalize"] else super()._settings(group, t)

    def _moments_of(self, p: Tensor) -> dict[str, Tensor]:
        if p in self._orthogonal:
            momentum_buffer(p, self._moments.setdefault(p, {}))
        return super()._moments_of(p)
