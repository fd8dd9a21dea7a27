"""Our kernels against the definitions in float64, on random inputs: how far off they are, and plain operations.

Where there is no GPU, Triton's interpreter runs the kernels of attention. Triton decides what its own functions are
when it is imported, so that is this module as a program of its own, with TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.device import device_name, select_device
from lmcore.errors import require
from lmcore.functional import scaled_dot_product_attention
from lmcore.kernels.attention import flash_attention
from lmcore.kernels.common.support import has_triton, runs_triton
from lmcore.kernels.cross_entropy import linear_cross_entropy
from lmcore.model import causal_mask
from lmcore.profiling.kernels.elementwise import gate, norm
from lmcore.profiling.kernels.loss import loss_and_gradients, loss_inputs, plain_loss
from lmcore.profiling.kernels.measuring import DTYPES, relative_error, with_gradients
from lmcore.profiling.runner import run_apart
from lmcore.profiling.workload import WorkloadConfig

TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Largest relative error, by precision: some 100 roundings of float32, 2 to 3 of half precision."""

ATTENTION_SHAPES = ((1, 1, 1, 16), (2, 3, 37, 16), (1, 2, 130, 32), (1, 2, 128, 64), (1, 1, 257, 80), (1, 1, 192, 128))
"""(batch, heads, positions, head size): one position, odd lengths, whole tiles, a head size that is no power of two."""

INTERPRETED_SHAPES = ((1, 1, 37, 16), (1, 2, 48, 32))
"""Tiny ones: every instruction of every program is interpreted."""


def wide(x: Tensor) -> Tensor:
    """The same values in float64, on the CPU: not every device has it."""
    return x.detach().cpu().double()


def compared(
    names: Sequence[str], precision: str, ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]
) -> dict[str, Any]:
    """The largest relative error of ours and of the plain ones, in which output, and whether it is within tolerance."""
    errors = {name: relative_error(*pair) for name, *pair in zip(names, ours, exact, strict=True)}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "errors": errors,
        "error": errors[worst],
        "worst": worst,
        "plain_error": max(relative_error(*pair) for pair in zip(plain, exact, strict=True)),
        "tolerance": TOLERANCES[precision],
        "holds": errors[worst] <= TOLERANCES[precision],
    }


def attention_rows(
    attend: Callable[..., Tensor], device: torch.device, shapes: Sequence[Sequence[int]], precisions: Sequence[str]
) -> list[dict[str, Any]]:
    """Errors of `attend(q, k, v, causal)` and of the definition in the same type, by shape, mask and precision."""
    rows = []
    for number, shape in enumerate(shapes):
        for precision in precisions:
            for causal in (True, False):
                torch.manual_seed(number)
                inputs = [torch.randn(shape, device=device).to(DTYPES[precision]) for _ in range(4)]

                ours, plain = both_passes(attend, inputs, causal), both_passes(definition, inputs, causal)
                exact = both_passes(definition, [*map(wide, inputs)], causal)
                head = {"kernel": "attention", "shape": list(shape), "causal": causal, "precision": precision}
                rows.append(head | compared(("O", "dQ", "dK", "dV"), precision, ours, plain, exact))
    return rows


def both_passes(attend: Callable[..., Tensor], tensors: Sequence[Tensor], causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v, given these and the output's gradient."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    return with_gradients(lambda *x: attend(*x, causal), leaves, tensors[3])


def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by `lmcore.functional`."""
    mask = causal_mask(q.shape[-2], q.shape[-2], q.device) if causal else None
    return scaled_dot_product_attention(q, k, v, mask)


def other_rows(device: torch.device, precisions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same of loss, norm and gate, each with odd sizes."""
    for precision in precisions:
        dtype = DTYPES[precision]
        torch.manual_seed(1)

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        x, weight, targets = loss_inputs(67, 48, 203, dtype, device)
        exact = [y.requires_grad_() for y in (wide(x), wide(weight))]
        ways = [
            loss_and_gradients(linear_cross_entropy, x, weight, targets),
            loss_and_gradients(plain_loss, x, weight, targets),
            loss_and_gradients(plain_loss, *exact, targets.cpu()),
        ]
        found = [("linear and cross-entropy", [67, 48, 203], ("loss", "dx", "dW"), ways)]
        for one, shape, names in (
            (norm(random(37, 80), random(37, 80), random(37, 80)), [37, 80], ("y", "dx", "dg")),
            (gate(random(37, 2 * 88), random(37, 88)), [37, 88], ("h", "dab")),
        ):
            found.append((one.name, shape, names, [one.ours().call(), one.plain(), one.plain(convert=wide)]))
        for name, shape, names, ways in found:
            head = {"kernel": name, "shape": shape, "causal": None, "precision": precision}
            yield head | compared(names, precision, *ways)


def measure_agreement(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Errors of everything above on the cell's device: a task of `lmcore.profiling.runner.run_cases`.

    The result holds `device`, `by`, what computed ("Triton kernels" or "plain-PyTorch twins"), and `rows`.
    """
    device, _ = select_device(config.device)
    kernels = runs_triton(device)
    precisions = [name for name in TOLERANCES if device.type != "mps" or name == "fp32"]
    rows_of = side_by_side if kernels else attention_rows
    rows = rows_of(flash_attention, device, ATTENTION_SHAPES, precisions)
    rows += other_rows(device, [name for name in precisions if name != "fp16"])  # the fused loss has none
    by = "Triton kernels" if kernels else "plain-PyTorch twins"
    return {"device": device_name(device), "by": by, "rows": rows}


def side_by_side(
    attend: Callable[..., Tensor], device: torch.device, shapes: Sequence[Sequence[int]], precisions: Sequence[str]
) -> list[dict[str, Any]]:
    """`attention_rows` with a process for each shape: compiling the kernels is most of the work."""
    with ThreadPoolExecutor(max(1, min(len(shapes), (os.cpu_count() or 1) // 2))) as pool:
        arguments = [(attend, device, [shape], precisions) for shape in shapes]
        results = [*pool.map(lambda one: run_apart(attention_rows, one, None), arguments)]
    for outcome, reason in results:
        if outcome != "complete":
            raise RuntimeError(reason)
    return [row for _, rows in results for row in rows]


def measure_interpreted(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Errors of attention's Triton code, run by Triton's interpreter on the CPU: a task of `run_cases`.

    The result is that of `measure_agreement`; on a GPU and without Triton `rows` is empty and `reason` says why.
    """
    head: dict[str, Any] = {"device": "CPU", "by": "Triton kernels, interpreted", "rows": []}
    if select_device(config.device)[0].type == "cuda":
        return head | {"reason": "the kernels themselves run on this GPU"}
    if not has_triton():
        return head | {"reason": "Triton is not installed; it is part of PyTorch's CUDA builds for Linux"}
    program, variables = [sys.executable, "-m", __name__], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"Triton's interpreter failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return head | {"rows": json.loads(done.stdout)}


class Interpreted(torch.autograd.Function):
    """The Triton kernels on tensors of the CPU, for which `lmcore.kernels` chooses the reference implementation."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from lmcore.kernels.attention import gpu

        output, lse = gpu.forward(q, k, v, causal, torch.empty_like(q))
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.causal = causal
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from lmcore.kernels.attention import gpu

        q, k, v, output, lse = ctx.saved_tensors
        into = [torch.empty_like(x) for x in (q, k, v)]
        return *gpu.backward(q, k, v, output, lse, gradient.contiguous(), ctx.causal, *into), None


def agreement_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each comparison of each record; `by` says what computed ours."""
    rows = []
    for record in records.values():
        result = record["result"] or {}
        for row in result.get("rows", ()):
            by, shape = result["by"], " × ".join(map(str, row["shape"]))
            rows.append({"by": by, **row, "shape": shape, "device": result["device"]})
    return pd.DataFrame(rows).drop(columns="errors", errors="ignore")


if __name__ == "__main__":
    print(json.dumps(attention_rows(Interpreted.apply, torch.device("cpu"), INTERPRETED_SHAPES, ["fp32"])))
