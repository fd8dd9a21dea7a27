"""Attention alone: ours beside PyTorch's back ends and FlexAttention; and the memory that it takes by length."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lmcore import functional
from lmcore.model import causal_mask

from .measuring import Absent, Built, Contestant, Race, compiled
from .rows import Cell, Conditions, Row
from .targets import CUDNN, FLASH

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

FLOPS_PER_PAIR = {"forward": 4, "both": 14}
"""Per query, key and feature: two matrix products forward, and backward five, all of 2 FLOPs (Dao 2023, section 4.1).
Half of them under the causal mask."""


def settings(head_size: int, length: int, passes: str, batch_size: int, heads: int = 16, **more: Any) -> dict[str, Any]:
    """Settings of an attention cell."""
    return {
        "batch_size": batch_size,
        "heads": heads,
        "context_length": length,
        "head_size": head_size,
        "causal": True,
        "passes": passes,
        "precision": "bf16",
        # compiling FlexAttention takes seconds: it takes part where both passes are measured
        "contestants": [CUDNN, FLASH, *(["FlexAttention"] if passes == "both" else []), "lmcore flash"],
    } | more


def flops(settings: dict[str, Any]) -> float:
    """FLOPs that attention of these settings needs."""
    s = settings
    pairs = s["batch_size"] * s["heads"] * s["context_length"] ** 2 * (0.5 if s["causal"] else 1)
    return FLOPS_PER_PAIR[s["passes"]] * pairs * s["head_size"]


def measure(cell: Cell, conditions: Conditions) -> list[Row]:
    """Times attention of random q, k and v, forward or in both directions."""
    s, device = cell.settings, torch.device(conditions.device)
    torch.manual_seed(0)
    shape = (s["batch_size"], s["heads"], s["context_length"], s["head_size"])
    q, k, v, do = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(s["passes"] == "both")
    ceiling = conditions.ceilings["bf16_flops_per_second"]
    race = Race(
        cell,
        conditions,
        [contestant(name, s, (q, k, v, do), conditions) for name in s["contestants"]],
        reference=None if s.get("unchecked") else reference(q, k, v, do, s["causal"]),
        amount=flops(s) / 1e12,
        rate_unit="TFLOP/s",
        share=lambda seconds: flops(s) / seconds / ceiling,
        share_of="measured matmul",
    )
    return race.rows()


def contestant(name: str, settings: dict[str, Any], tensors: tuple[Tensor, ...], conditions: Conditions) -> Contestant:
    """One way to compute attention, forward alone or with the gradients of q, k and v."""
    q, k, v, do = tensors

    def build() -> Built:
        attend = WAYS[name](settings, conditions)

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attend(q, k, v),)

        def both() -> tuple[Tensor, ...]:
            o = attend(q, k, v)
            return (o, *torch.autograd.grad(o, (q, k, v), do))

        run = forward if settings["passes"] == "forward" else both
        try:
            first = run()
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Absent("PyTorch has no such kernel for these inputs on this device.") from error
            raise
        return Built(run, results=None if settings.get("unchecked") else [last_head(x) for x in first])

    return Contestant(name, build, ours=name == "lmcore flash")


def last_head(x: Tensor) -> Tensor:
    """The last head of the first sequence, which is what is checked: of all the scores would be too many."""
    return x[0, -1].detach().clone()


def reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> list[Tensor]:
    """Output, and where q wants them gradients of q, k and v, of the last head in float64 by the definition."""
    wide = [last_head(x).double().requires_grad_(q.requires_grad) for x in (q, k, v)]
    mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if causal else None
    o = functional.scaled_dot_product_attention(*wide, mask)
    gradients = torch.autograd.grad(o, wide, last_head(do).double()) if q.requires_grad else ()
    return [x.float() for x in (o.detach(), *gradients)]


def _plain(settings: dict[str, Any], conditions: Conditions) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if settings["causal"] else None
        return functional.scaled_dot_product_attention(q, k, v, mask)

    return attend


def _backend(backend: SDPBackend) -> Callable[[dict[str, Any], Conditions], Attend]:
    def way(settings: dict[str, Any], conditions: Conditions) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=settings["causal"])

        return attend

    return way


def _flex(settings: dict[str, Any], conditions: Conditions) -> Attend:
    if torch.device(conditions.device).type != "cuda":
        raise Absent("FlexAttention is measured compiled for a GPU.")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = settings["context_length"]
    mask = None
    if settings["causal"]:
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, length, length, device=conditions.device
        )
    attend = compiled(flex_attention, conditions)
    return lambda q, k, v: attend(q, k, v, block_mask=mask)


def _ours(settings: dict[str, Any], conditions: Conditions) -> Attend:
    from lmcore.kernels.attention import flash_attention

    return lambda q, k, v: flash_attention(q, k, v, causal=settings["causal"])


WAYS = {
    "plain": _plain,
    "SDPA": lambda settings, conditions: lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    CUDNN: _backend(SDPBackend.CUDNN_ATTENTION),
    FLASH: _backend(SDPBackend.FLASH_ATTENTION),
    "FlexAttention": _flex,
    "lmcore flash": _ours,
}
"""Names of contestants, and what makes each."""
