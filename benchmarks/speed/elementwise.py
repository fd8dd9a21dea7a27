"""Our kernels between the matrix products, each beside what torch.compile makes of the plain definition."""

from collections.abc import Callable

import torch
from torch import Tensor

from lmcore.functional import silu
from lmcore.model import RotaryPositionalEmbedding

from .measuring import Built, Contestant, Race, compiled
from .rows import Cell, Conditions, Row


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times one of `WORKS` in bf16: what torch.compile makes of it, and our kernel."""
    ceiling = conditions.ceilings["copy_bytes_per_second"]
    torch.manual_seed(0)
    theirs, ours, reference, moved = WORKS[cell.settings["kernel"]](cell, conditions)
    race = Race(
        cell,
        conditions,
        [Contestant("torch.compile", theirs), Contestant("lmcore fused", ours, ours=True)],
        reference=reference,
        amount=moved / 1e9,
        rate_unit="GB/s",
        share=lambda seconds: moved / seconds / ceiling,
        share_of="measured copy",
    )
    return race.rows()


Work = tuple[Callable[[], Built], Callable[[], Built], list[Tensor], int]
"""Who builds torch.compile's and ours, what both should give, and bytes that have to be read and written."""


def rmsnorm(cell: Cell, conditions: Conditions) -> Work:
    """Residual sum and norm, forward and backward, the stream's gradient added; rows of d_model features."""
    from lmcore.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
    from lmcore.kernels.rmsnorm.reference import rmsnorm_plain

    x, branch, dsum, dy = random(conditions, 4, cell.settings["rows"], cell.settings["d_model"])
    gain = torch.rand(cell.settings["d_model"], device=x.device) + 0.5

    def gradients(plain: Callable, x: Tensor, branch: Tensor, gain: Tensor) -> list[Tensor]:
        x, branch, gain = (tensor.detach().requires_grad_() for tensor in (x, branch, gain))
        outputs = plain(x, branch, gain)
        found = torch.autograd.grad(
            outputs, (x, gain), [d.to(o.dtype) for d, o in zip((dsum, dy), outputs, strict=True)]
        )
        return [outputs[1].detach(), *found]

    def definition(x: Tensor, branch: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm_plain(x, gain, branch=branch)

    def theirs() -> Built:
        plain = compiled(definition, conditions)
        return checked(lambda: gradients(plain, x, branch, gain))

    def run() -> list[Tensor]:
        total, y, rstd = rmsnorm_forward(x, gain, branch=branch)
        dx, partials = rmsnorm_backward(dy, total, gain, rstd, dsum)
        return [y, dx, partials.sum(0)]

    wide = gradients(definition, x.float(), branch.float(), gain)
    return theirs, lambda: checked(run), wide, 8 * x.nbytes  # forward 2 + 2, backward 3 + 1


def rope(cell: Cell, conditions: Conditions) -> Work:
    """Rotation of queries and keys as they come out of one projection."""
    from lmcore.kernels.rope import rope_

    s = cell.settings
    heads, length, head_size = s["heads"], s["context_length"], s["head_size"]
    turn = RotaryPositionalEmbedding(10_000.0, head_size, length, torch.device(conditions.device))
    (qkv,) = random(conditions, 1, s["rows"], 3 * heads * head_size)
    positions = torch.arange(length, device=qkv.device)

    def definition(qkv: Tensor) -> list[Tensor]:
        q, k, _ = qkv.view(-1, length, 3, heads, head_size).unbind(2)
        return [turn(x.transpose(1, 2), positions).transpose(1, 2) for x in (q, k)]

    def ours() -> Built:
        work = qkv.clone()
        rope_(work, turn.cos, turn.sin, length)
        q, k, _ = work.view(-1, length, 3, heads, head_size).unbind(2)
        results = [q.clone(), k.clone()]
        return Built(lambda: rope_(work, turn.cos, turn.sin, length), results=results)

    def theirs() -> Built:
        plain = compiled(definition, conditions)
        return checked(lambda: plain(qkv))

    return theirs, ours, definition(qkv.float()), 2 * qkv.nbytes * 2 // 3


def swiglu(cell: Cell, conditions: Conditions) -> Work:
    """The gate forward and backward, from the two halves of one projection."""
    from lmcore.kernels.swiglu import swiglu_backward_, swiglu_forward

    s = cell.settings
    (ab,), (dh,) = random(conditions, 1, s["rows"], 2 * s["d_ff"]), random(conditions, 1, s["rows"], s["d_ff"])

    def definition(ab: Tensor) -> Tensor:
        a, b = ab.chunk(2, dim=-1)
        return silu(a) * b

    def gradients(plain: Callable, ab: Tensor) -> list[Tensor]:
        ab = ab.detach().requires_grad_()
        h = plain(ab)
        return [h.detach(), *torch.autograd.grad(h, ab, dh.to(h.dtype))]

    def theirs() -> Built:
        plain = compiled(definition, conditions)
        return checked(lambda: gradients(plain, ab))

    def ours() -> Built:
        work = ab.clone()

        def run() -> list[Tensor]:
            return [swiglu_forward(work), swiglu_backward_(dh, work)]

        results = [x.clone() for x in run()]
        return Built(run, reset=lambda: work.copy_(ab), results=results)

    return theirs, ours, gradients(definition, ab.float()), 2 * ab.nbytes + ab.nbytes + 2 * dh.nbytes


def random(conditions: Conditions, count: int, *shape: int) -> list[Tensor]:
    """Random bf16 tensors of one shape."""
    return [torch.randn(shape, device=conditions.device).bfloat16() for _ in range(count)]


def checked(run: Callable[[], list[Tensor]]) -> Built:
    """`run` and what it gives."""
    return Built(run, results=run())


WORKS = {"rmsnorm": rmsnorm, "rope": rope, "swiglu": swiglu}
"""The kernels, and what they do."""
