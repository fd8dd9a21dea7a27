"""Muon that a CUDA graph can hold: `lmcore.optimizer.Muon` as `FusedAdamW` has AdamW."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lmcore.fast.kernels import dispatch
from lmcore.fast.kernels.adamw import NOTHING, FusedAdamW, Settings, Slot
from lmcore.fast.streams import HIGH, SideStream
from lmcore.optimizer import momentum_buffer, muon_scalars, muon_update, orthogonalize


class Stack:
    """Matrices of one shape of the group with this number, each with its momentum as `Slot.m`, which are updated on a
    stream of their own; their `scalars` (`muon_scalars`) lie on the device."""

    def __init__(self, number: int, momentum: float, slots: list[Slot]):
        self.number, self.momentum, self.slots, self.shape = number, momentum, slots, slots[0].p.shape
        device, self.table = slots[0].p.device, None
        if dispatch.runs_triton(device):
            from lmcore.fast.kernels.muon.gpu import Matrices

            self.table = Matrices(slots)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            self.directions = torch.zeros(len(slots), *self.shape, device=device, dtype=dtype)
        self.scalars = torch.zeros(2, device=device)
        self.stream = SideStream(device, HIGH)

    def send(self, group: dict) -> None:
        """Puts the scalars of this step on the device, without waiting for it."""
        scalars = torch.tensor(muon_scalars(group, self.shape))
        self.scalars.copy_(scalars.pin_memory() if self.scalars.is_cuda else scalars, non_blocking=True)

    def warm_up(self) -> None:
        """Compiles what `update` launches; changes nothing."""
        if self.table is not None:
            self.scalars.copy_(torch.tensor([1.0, 0.0]))
            self.update(self.scalars[:1], momentum=1.0)

    def update(self, clip: Tensor, momentum: float) -> None:
        """`lmcore.optimizer.muon_update` by the gradients times `clip` (1,), and the compute weights."""
        if self.table is not None:
            with dispatch.on_device_of(clip):
                self.table.look_ahead(self.directions, clip, momentum)
                self.table.step(orthogonalize(self.directions), self.scalars)
            return
        matrices, gradients, buffers, _, copies = map(list, zip(*self.slots, strict=True))
        muon_update(matrices, torch.stack(gradients) * clip, buffers, momentum, *self.scalars.unbind())
        if copies[0] is not None:
            torch._foreach_copy_(copies, matrices)


class FusedMuon(FusedAdamW):
    """`lmcore.optimizer.Muon` and the clipping of gradients without a wait for the host; states are interchangeable.

    Groups with `orthogonalize=True` hold matrices, which batched matmuls update; all else is as `FusedAdamW` has it.
    """

    def __init__(
        self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, momentum: float = 0.95, max_grad_norm: float | None = None,
    ):  # fmt: skip
        further = {"momentum": momentum, "orthogonalize": False}
        super().__init__(params, lr, betas, eps, weight_decay, max_grad_norm, further)
        self._orthogonal = {p for group in self.param_groups if group["orthogonalize"] for p in group["params"]}
        self._stacks: list[Stack] = []
        self._side = SideStream(self.norm.device)

    @torch.no_grad()
    def prepare(self) -> None:
        """See `FusedAdamW.prepare`."""
        super().prepare()
        for stack in self._stacks:
            stack.send(self.param_groups[stack.number])  # loading a state makes new groups

    @torch.no_grad()
    def apply(self) -> None:
        """See `FusedAdamW.apply`."""
        clip = torch.ones_like(self.norm)[None]
        if self.max_grad_norm is not None:
            clip = torch.clamp(self.max_grad_norm / (self.norm[None] + 1e-6), max=1.0)
        for stack in self._stacks:
            with stack.stream():
                stack.update(clip, stack.momentum)
        with self._side():  # many bytes beside many small matmuls
            super().apply()
        for stream in (self._side, *(stack.stream for stack in self._stacks)):
            stream.wait()

    def warm_up(self) -> None:
        """See `FusedAdamW.warm_up`."""
        super().warm_up()
        for stack in self._stacks:
            stack.warm_up()

    def _build(self) -> list[tuple[dict, Tensor, Tensor]]:
        before, found = self._addresses, super()._build()
        if before is not self._addresses:  # another table, so other stacks
            numbers = {id(group): number for number, group in enumerate(self.param_groups)}
            stacks: dict[tuple, list[Slot]] = {}
            for group, p, gradient in found:
                if p in self._orthogonal:
                    key = numbers[id(group)], group["momentum"], p.shape
                    slot = self._slot(p, gradient)._replace(m=self._moments_of(p)["momentum_buffer"])
                    stacks.setdefault(key, []).append(slot)
            self._stacks = [Stack(*key[:2], slots) for key, slots in stacks.items()]
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
