"""Our kernels against the definitions in float64, on random inputs: how far off they are, and plain operations."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.device import device_name, select_device
from lmcore.functional import scaled_dot_product_attention, silu
from lmcore.kernels.attention import flash_attention
from lmcore.kernels.common.support import runs_triton
from lmcore.kernels.cross_entropy import linear_cross_entropy
from lmcore.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lmcore.kernels.rmsnorm.reference import rmsnorm_plain
from lmcore.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.model import causal_mask
from lmcore.profiling.kernels.loss import plain_loss
from lmcore.profiling.kernels.measuring import DTYPES
from lmcore.profiling.runner import run_apart
from lmcore.profiling.workload import WorkloadConfig

TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Largest relative error, by precision: some 100 roundings of float32, 2 to 3 of half precision."""

ATTENTION_SHAPES = ((1, 1, 1, 16), (2, 3, 37, 16), (1, 2, 130, 32), (1, 2, 128, 64), (1, 1, 257, 80), (1, 1, 192, 128))
"""(batch, heads, positions, head size): one position, odd lengths, whole tiles, a head size that is no power of two."""

Outputs = dict[str, Tensor]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| by the l2 norm, in float64; without the divisor where that is 0."""
    wanted = wide(wanted)
    difference = (wide(found) - wanted).norm().item()
    return difference / (wanted.norm().item() or 1.0)


def attention_outputs(attend: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> Outputs:
    """Output and gradients of one way to compute attention."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attend(*leaves)
    return named(("O", "dQ", "dK", "dV"), output, leaves, gradient)


def named(names: Sequence[str], output: Tensor, leaves: Sequence[Tensor], gradient: Tensor | None = None) -> Outputs:
    """The output and the gradients of `leaves`, by name."""
    found = (output.detach(), *torch.autograd.grad(output, leaves, gradient))
    return dict(zip(names, found, strict=True))


def wide(x: Tensor) -> Tensor:
    """The same values in float64, on the CPU: not every device has it."""
    return x.detach().cpu().double()


def attention_rows(
    attend: Callable[..., Tensor], device: torch.device, shapes: Sequence[Sequence[int]], precisions: Sequence[str]
) -> list[dict[str, Any]]:
    """Errors of `attend(q, k, v, causal)` and of the definition in the same type, by shape, mask and precision."""
    rows = []
    for number, shape in enumerate(shapes):
        for precision in precisions:
            for causal in (True, False):
                torch.manual_seed(number)
                *inputs, gradient = (torch.randn(shape, device=device).to(DTYPES[precision]) for _ in range(4))

                def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
                    mask = causal_mask(q.shape[-2], q.shape[-2], q.device) if causal else None
                    return scaled_dot_product_attention(q, k, v, mask)

                exact = attention_outputs(definition, [wide(x) for x in inputs], wide(gradient))
                plain = attention_outputs(definition, inputs, gradient)
                ours = attention_outputs(lambda *x, causal=causal: attend(*x, causal), inputs, gradient)
                rows.append(
                    {"kernel": "attention", "shape": list(shape), "causal": causal, "precision": precision}
                    | compared(ours, plain, exact, precision)
                )
    return rows


def compared(ours: Outputs, plain: Outputs, exact: Outputs, precision: str) -> dict[str, Any]:
    """The largest relative error of ours and of the plain ones, in which output, and whether it is within tolerance."""
    errors = {name: relative_error(ours[name], exact[name]) for name in exact}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "errors": errors,
        "error": errors[worst],
        "worst": worst,
        "plain_error": max(relative_error(plain[name], exact[name]) for name in exact),
        "tolerance": TOLERANCES[precision],
        "holds": all(error <= TOLERANCES[precision] for error in errors.values()),
    }


def other_rows(device: torch.device, precisions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same of loss, norm and gate, each with odd sizes."""
    for precision in precisions:
        dtype = DTYPES[precision]
        torch.manual_seed(1)
        for name, shape, ways in (
            ("linear and cross-entropy", (67, 48, 203), loss_ways(67, 48, 203, device, dtype)),
            ("residual sum, RMSNorm", (37, 80), norm_ways(37, 80, device, dtype)),
            ("SwiGLU's gate", (37, 88), gate_ways(37, 88, device, dtype)),
        ):
            ours, plain, exact = ways
            yield (
                {"kernel": name, "shape": list(shape), "causal": None, "precision": precision}
                | compared(ours, plain, exact, precision)
            )


Ways = tuple[Outputs, Outputs, Outputs]
"""Ours, the definition in the same type, and the definition in float64."""


def loss_ways(n: int, d: int, v: int, device: torch.device, dtype: torch.dtype) -> Ways:
    """Head and loss of n rows of d features over a vocabulary of v."""
    x, weight = torch.randn(n, d, device=device).to(dtype), (0.2 * torch.randn(v, d, device=device)).to(dtype)
    targets = torch.randint(v, (n,), device=device)

    def outputs(loss: Callable[..., Tensor], *leaves: Tensor) -> Outputs:
        leaves = tuple(y.detach().requires_grad_() for y in leaves)
        return named(("loss", "dx", "dW"), loss(*leaves, targets.to(leaves[0].device)), leaves)

    exact = outputs(plain_loss, wide(x), wide(weight))
    return outputs(linear_cross_entropy, x, weight), outputs(plain_loss, x, weight), exact


def norm_ways(n: int, d: int, device: torch.device, dtype: torch.dtype) -> Ways:
    """RMSNorm of the sum of two (n, d) tensors."""
    x, branch, dy = (torch.randn(n, d, device=device).to(dtype) for _ in range(3))
    gain = torch.rand(d, device=device) + 0.5

    def outputs(x: Tensor, gain: Tensor, branch: Tensor, dy: Tensor) -> Outputs:
        leaves = [y.detach().requires_grad_() for y in (x, gain)]
        return named(("y", "dx", "dg"), rmsnorm_plain(*leaves, branch=branch)[1], leaves, dy)

    total, y, rstd = rmsnorm_forward(x, gain, branch=branch)
    dx, partials = rmsnorm_backward(dy, total, gain, rstd)
    ours = {"y": y, "dx": dx, "dg": partials.sum(dim=0)}
    return ours, outputs(x, gain, branch, dy), outputs(*(wide(y) for y in (x, gain, branch, dy)))


def gate_ways(n: int, f: int, device: torch.device, dtype: torch.dtype) -> Ways:
    """SiLU(a) b of the halves of an (n, 2f) tensor."""
    ab, dh = torch.randn(n, 2 * f, device=device).to(dtype), torch.randn(n, f, device=device).to(dtype)

    def outputs(ab: Tensor, dh: Tensor) -> Outputs:
        leaf = ab.detach().requires_grad_()
        a, b = leaf.chunk(2, dim=-1)
        return named(("h", "dab"), silu(a) * b, [leaf], dh)

    ours = {"h": swiglu_forward(ab), "dab": swiglu_backward_(dh, ab.clone())}
    return ours, outputs(ab, dh), outputs(wide(ab), wide(dh))


def measure_agreement(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Errors of everything above on the cell's device: a task of `lmcore.profiling.cells.run_cells`.

    The result holds `device`, `by`, what computed ("Triton kernels" or "plain-PyTorch twins"), and `rows`.
    """
    device, _ = select_device(config.device)
    kernels = runs_triton(device)
    precisions = [name for name in TOLERANCES if device.type != "mps" or name == "fp32"]
    if kernels:
        rows = side_by_side(device, ATTENTION_SHAPES, precisions)
    else:
        rows = attention_rows(flash_attention, device, ATTENTION_SHAPES, precisions)
    rows += other_rows(device, [name for name in precisions if name != "fp16"])  # the fused loss has none
    return {
        "device": device_name(device),
        "by": "Triton kernels" if kernels else "plain-PyTorch twins",
        "rows": rows,
    }


def side_by_side(
    device: torch.device, shapes: Sequence[Sequence[int]], precisions: Sequence[str]
) -> list[dict[str, Any]]:
    """`attention_rows` of our kernels with a process for each shape: compiling them is most of the work."""
    with ThreadPoolExecutor(max(1, min(len(shapes), (os.cpu_count() or 1) // 2))) as pool:
        calls = [pool.submit(run_apart, rows_of_a_shape, (str(device), shape, precisions), None) for shape in shapes]
        results = [call.result() for call in calls]
    for outcome, reason in results:
        if outcome != "complete":
            raise RuntimeError(reason)
    return [row for _, rows in results for row in rows]


def rows_of_a_shape(device: str, shape: Sequence[int], precisions: Sequence[str]) -> list[dict[str, Any]]:
    """In a process of its own: the rows of one shape."""
    return attention_rows(flash_attention, torch.device(device), [shape], precisions)


def agreement_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each comparison of each record; `by` says what computed ours."""
    rows = []
    for record in records.values():
        result = record["result"] or {}
        for row in result.get("rows", ()):
            by, shape = result["by"], " × ".join(map(str, row["shape"]))
            rows.append({"by": by, **row, "shape": shape, "device": result["device"]})
    return pd.DataFrame(rows).drop(columns="errors", errors="ignore")
