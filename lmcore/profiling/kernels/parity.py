"""Our kernels against the reference in float64, on random inputs: how far off they are, and plain operations.

Where there is no GPU, Triton's interpreter runs the kernels of attention. Triton decides what its own functions are
when it is imported, so that is this module as a program of its own, with TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.device import device_name, select_device
from lmcore.errors import require
from lmcore.kernels.attention import flash_attention
from lmcore.kernels.common.support import has_triton, runs_triton
from lmcore.profiling.kernels.cases import KernelCase, attention, gate, loss, norm
from lmcore.profiling.kernels.measuring import DTYPES, relative_error
from lmcore.profiling.runner import run_apart
from lmcore.profiling.workload import WorkloadConfig

TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Largest relative error, by precision: some 100 roundings of float32, 2 to 3 of half precision."""

ATTENTION_SHAPES = ((1, 1, 1, 16), (2, 3, 37, 16), (1, 2, 130, 32), (1, 2, 128, 64), (1, 1, 257, 80), (1, 1, 192, 128))
"""(batch, heads, positions, head size): one position, odd lengths, whole tiles, a head size of no power of two."""

INTERPRETED_SHAPES = ((1, 1, 37, 16),)
"""A tiny one: every instruction of every program is interpreted."""

Rows = list[dict[str, Any]]


def wide(x: Tensor) -> Tensor:
    """The same values in float64, on the CPU: not every device has it. Token ids remain whole numbers."""
    x = x.detach().cpu()
    return x.double() if x.is_floating_point() else x


def compared(case: KernelCase, shape: Sequence[int], precision: str, causal: bool | None = None) -> dict[str, Any]:
    """The largest relative error of ours and of the reference in the same type, in which result, and whether it is
    within tolerance."""
    exact = case.run(convert=wide)
    ours = {name: relative_error(*pair) for name, *pair in zip(case.results, case.ours().call(), exact, strict=True)}
    worst = max(ours, key=lambda name: ours[name])
    return {
        "kernel": case.name,
        "shape": list(shape),
        "causal": causal,
        "precision": precision,
        "errors": ours,
        "error": ours[worst],
        "worst": worst,
        "plain_error": max(relative_error(*pair) for pair in zip(case.run(), exact, strict=True)),
        "tolerance": TOLERANCES[precision],
        "holds": ours[worst] <= TOLERANCES[precision],
    }


def attention_rows(
    attend: Callable[..., Tensor], device: torch.device, shapes: Sequence[Sequence[int]], precisions: Sequence[str]
) -> Rows:
    """`compared` for `attend(q, k, v, causal)`, by shape, mask and precision."""
    rows = []
    for number, shape in enumerate(shapes):
        for precision in precisions:
            for causal in (True, False):
                torch.manual_seed(number)
                case = attention(shape, DTYPES[precision], device, causal, attend)
                rows.append(compared(case, shape, precision, causal))
    return rows


def other_rows(device: torch.device, precisions: Sequence[str]) -> Rows:
    """The same of loss, norm and gate, each with odd sizes."""
    rows = []
    for precision in precisions:
        dtype = DTYPES[precision]
        torch.manual_seed(1)
        rows.append(compared(loss(67, 48, 203, dtype, device), [67, 48, 203], precision))
        x, branch, dy = torch.randn(3, 37, 80, device=device).to(dtype)
        rows.append(compared(norm(x, branch, dy), [37, 80], precision))
        ab, dh = (torch.randn(37, width, device=device).to(dtype) for width in (2 * 88, 88))
        rows.append(compared(gate(ab, dh), [37, 88], precision))
    return rows


def side_by_side(
    attend: Callable[..., Tensor], device: torch.device, shapes: Sequence[Sequence[int]], precisions: Sequence[str]
) -> Rows:
    """`attention_rows` with a process for each shape: compiling the kernels is most of the work."""
    with ThreadPoolExecutor(max(1, min(len(shapes), (os.cpu_count() or 1) // 2))) as pool:
        arguments = [(attend, device, [shape], precisions) for shape in shapes]
        results = [*pool.map(lambda one: run_apart(attention_rows, one, None), arguments)]
    for outcome, reason in results:
        if outcome != "complete":
            raise RuntimeError(reason)
    return [row for _, rows in results for row in rows]


def measure_parity(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Errors of everything above on the case's device: a task of `lmcore.profiling.runner.run_cases`.

    The result holds `device`, `by`, what computed ("Triton kernels" or "reference implementation"), and `rows`.
    """
    device, _ = select_device(config.device)
    kernels = runs_triton(device)
    precisions = [name for name in TOLERANCES if device.type != "mps" or name == "fp32"]
    rows = (side_by_side if kernels else attention_rows)(flash_attention, device, ATTENTION_SHAPES, precisions)
    rows += other_rows(device, [name for name in precisions if name != "fp16"])  # the fused loss has none
    by = "Triton kernels" if kernels else "reference implementation"
    return {"device": device_name(device), "by": by, "rows": rows}


def measure_interpreted(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Errors of attention's Triton code, run by Triton's interpreter on the CPU: a task of `run_cases`.

    The result is that of `measure_parity`; on a GPU and without Triton `rows` is empty and `reason` says why.
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


if __name__ == "__main__":
    print(json.dumps(attention_rows(Interpreted.apply, torch.device("cpu"), INTERPRETED_SHAPES, ["fp32"])))
