"""AdamW as one pass over all parameters: clipping folded in, compute weights written beside, no wait for the device."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmcore.errors import require
from lmcore.fast.kernels import dispatch
from lmcore.fast.kernels.dispatch import on_device_of
from lmcore.optimizer import AdamW, gradient_norm


class Slot(NamedTuple):
    """The tensors of one parameter, all of its size and contiguous."""

    p: Tensor  # float32
    gradient: Tensor  # bfloat16 or float32
    m: Tensor | None  # float32; None: the gradient is measured, and the parameter left alone
    v: Tensor | None  # float32
    copy: Tensor | None  # bfloat16 or float32: the parameter that the model computes with


class Settings(NamedTuple):
    """Scalars of one parameter's update (`lmcore.optimizer.adamw_update`), as a row of the kernels' table."""

    beta1: float
    gain1: float  # 1 - beta1
    beta2: float
    gain2: float  # 1 - beta2
    lr_t: float
    eps: float
    keep: float  # 1 - lr * weight_decay
    max_norm: float


NOTHING = Settings(beta1=1, gain1=0, beta2=1, gain2=0, lr_t=0, eps=1, keep=1, max_norm=math.inf)
"""Settings of an update that changes nothing."""


def update(slots: list[Slot], rows: list[Settings], norm: Tensor | None) -> None:
    """`lmcore.optimizer.adamw_update` for all `slots`, each with its row of settings: what the kernel computes.

    With `norm`, the gradients are clipped by it.
    """
    scale = None
    for (p, gradient, m, v, copy), row in zip(slots, rows, strict=True):
        if row is NOTHING or m is None:
            continue
        g = gradient.float()
        if norm is not None:
            scale = torch.clamp(row.max_norm / (norm + 1e-6), max=1.0) if scale is None else scale
            g = g * scale
        m.mul_(row.beta1).add_(g, alpha=row.gain1)
        v.mul_(row.beta2).addcmul_(g, g, value=row.gain2)
        p.addcdiv_(m, v.sqrt().add_(row.eps), value=-row.lr_t)
        p.mul_(row.keep)
        if copy is not None:
            copy.copy_(p)


class Plain:
    """Updates all slots by plain operations, where there is no Triton; the counterpart of `gpu.Table`."""

    def __init__(self, slots: list[Slot]):
        self.slots = slots

    def send(self, rows: list[Settings], index: list[int]) -> None:
        """Takes the settings of this step: slot i has those of row `index[i]`."""
        self.rows = [rows[i] for i in index]

    def measure(self, norm: Tensor) -> None:
        """Writes the gradients' joint l2 norm into `norm`."""
        norm.copy_(gradient_norm([slot.gradient.float() for slot in self.slots]) if self.slots else torch.zeros(()))

    def update(self, norm: Tensor | None) -> None:
        """The update; with `norm`, gradients are clipped by it."""
        update(self.slots, self.rows, norm)


class FusedAdamW(AdamW):
    """`lmcore.optimizer.AdamW` and the clipping of gradients in one pass; states of the two are interchangeable.

    Weights decay after their update, as there: the kernel multiplies the updated weight by 1 - lr * weight_decay.
    Parameters are float32 and contiguous, all on one device. `max_grad_norm` None neither measures nor clips the
    gradients; math.inf measures alone. Clipping scales them as `gradient_clipping` does, but on their way into the
    update: the gradients themselves stay as they are. On CUDA the pass is a Triton kernel over a table of addresses,
    elsewhere plain operations.

    `norm` is a scalar on the device: the joint l2 norm of the last step's gradients before clipping (NaN: not
    measured). A gradient that is not finite leaves weights that are not, as the plain clipping does.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
        further: dict[str, Any] | None = None,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, further)
        require(max_grad_norm is None or max_grad_norm > 0, f"max_grad_norm must be positive, not {max_grad_norm}.")
        parameters = [p for group in self.param_groups for p in group["params"]]
        kinds = {f"{p.dtype} on {p.device}" for p in parameters}
        fits = len(kinds) == 1 and parameters[0].dtype == torch.float32
        require(
            fits, f"{type(self).__name__} updates float32 parameters of one device, not {', '.join(sorted(kinds))}."
        )
        self.max_grad_norm = max_grad_norm
        self.norm = torch.full((), math.nan, device=parameters[0].device)
        self._moments: dict[Tensor, dict[str, Tensor]] = {}  # their addresses outlive a loaded state
        self._table = None
        self.bind({})

    def bind(
        self,
        gradients: Mapping[nn.Parameter, Tensor],
        compute_weights: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Reads gradients from `gradients` (default: p.grad); writes new parameters into `compute_weights` as well.

        Both map a parameter to a contiguous tensor of its shape on its device, bfloat16 or float32.
        """
        for p, tensor in [*gradients.items(), *(compute_weights or {}).items()]:
            _check(p, tensor)
        self._gradients, self._compute_weights = dict(gradients), dict(compute_weights or {})
        self._addresses: list[int] | None = None  # what the table was built for

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.prepare()
        self.launch()
        return loss

    @torch.no_grad()
    def prepare(self) -> None:
        """The host's part of a step: counts it, and sends the scalars that depend on t and the learning rate.

        Nothing waits for the device. With a `launch` in a CUDA graph, call it before every replay.
        """
        rows: list[Settings] = []
        numbers, index = {}, []  # most parameters share their row
        for group, p, _ in self._build():
            t = self._count(p)
            index.append(numbers.setdefault((id(group), t), len(rows)))
            if index[-1] == len(rows):
                rows.append(self._settings(group, t))
        self._table.send(rows, index)

    def launch(self) -> None:
        """The device's part of a step: norm, clipping and update. After `prepare`; a CUDA graph can capture it."""
        self.measure()
        self.apply()

    @torch.no_grad()
    def measure(self) -> None:
        """The norm of the gradients, where it is wanted: the first half of `launch`."""
        require(self._addresses is not None, "FusedAdamW.launch needs a prepare before it.")
        if self.max_grad_norm is not None:
            with on_device_of(self.norm):
                self._table.measure(self.norm)

    @torch.no_grad()
    def apply(self) -> None:
        """Clipping by the norm, and the update: the second half of `launch`."""
        norm = None if self.max_grad_norm is None else self.norm
        with on_device_of(self.norm):
            self._table.update(norm)

    def warm_up(self) -> None:
        """Builds the table and compiles the kernels for the present gradients; changes nothing but the norm."""
        found = self._build()
        self._table.send([NOTHING], [0] * len(found))
        self.measure()
        FusedAdamW.apply(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state of AdamW or FusedAdamW. The moments keep their addresses, which graphs may have captured."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name, mine in self._moments_of(p).items():
                mine.copy_(state[name])
            state.update(self._moments_of(p))
        for p, moments in self._moments.items():
            if p not in self.state:
                torch._foreach_zero_(list(moments.values()))

    def _count(self, p: Tensor) -> int:
        """The number of this update, from 1."""
        state = self.state[p]
        if not state:
            state.update(t=0, **self._moments_of(p))
        state["t"] += 1
        return state["t"]

    def _settings(self, group: dict, t: int) -> Settings:
        (beta1, beta2), lr = group["betas"], group["lr"]
        lr_t = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        keep = 1 - lr * group["weight_decay"]
        return Settings(beta1, 1 - beta1, beta2, 1 - beta2, lr_t, group["eps"], keep, self.max_grad_norm or math.inf)

    def _moments_of(self, p: Tensor) -> dict[str, Tensor]:
        """Tensors of a parameter's state by name."""
        if p not in self._moments:
            self._moments[p] = {name: torch.zeros_like(p) for name in ("m", "v")}
        return self._moments[p]

    def _slot(self, p: Tensor, gradient: Tensor) -> Slot:
        moments = (self._moments_of(p).get(name) for name in ("m", "v"))
        return Slot(p.detach(), gradient.detach(), *moments, self._compute_weights.get(p))

    def _build(self) -> list[tuple[dict, Tensor, Tensor]]:
        """(group, parameter, gradient) of every parameter that has one; the table for them, unless it is there."""
        parameters = [(group, p) for group in self.param_groups for p in group["params"]]
        found = [(group, p, self._gradients.get(p, p.grad)) for group, p in parameters]
        found = [(group, p, gradient) for group, p, gradient in found if gradient is not None]
        addresses = [tensor.data_ptr() for _, p, gradient in found for tensor in (p, gradient)]
        if addresses == self._addresses:
            return found
        slots = []
        for _, p, gradient in found:
            _check(p, p)
            _check(p, gradient)
            slots.append(self._slot(p, gradient))
        table = Plain
        if slots and dispatch.runs_triton(slots[0].p.device):
            from lmcore.fast.kernels.adamw.gpu import Table as table
        self._table = table(slots)
        self._addresses = addresses
        return found


def _check(p: Tensor, tensor: Tensor) -> None:
    """That `tensor` can stand beside the parameter `p` in the kernels' table."""
    alike = tensor.shape == p.shape and tensor.device == p.device and tensor.layout == torch.strided
    require(
        alike and tensor.dtype in (torch.bfloat16, torch.float32) and tensor.is_contiguous(),
        f"A gradient or copy of a parameter {tuple(p.shape)} on {p.device} must be bfloat16 or float32, contiguous, of "
        f"its shape and on its device; this is {tuple(tensor.shape)}, {tensor.dtype}, "
        f"{tensor.layout}, on {tensor.device}.",
    )
