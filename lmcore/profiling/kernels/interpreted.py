"""The Triton attention itself, run by Triton's interpreter on the CPU: for machines without a GPU.

Triton decides what its own functions are when it is imported, so this is a program of its own with TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.device import select_device
from lmcore.errors import require
from lmcore.kernels.common.support import has_triton
from lmcore.profiling.kernels.agreement import attention_rows
from lmcore.profiling.workload import WorkloadConfig

SHAPES = ((1, 1, 37, 16), (1, 2, 48, 32))
"""Tiny ones: every instruction of every program is interpreted."""


def measure_interpreted(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Errors of the portable kernels against the definition: a task of `lmcore.profiling.cells.run_cells`.

    The result is that of `lmcore.profiling.kernels.agreement.measure_agreement`; on a GPU and without Triton `rows` is
    empty and `reason` says why.
    """
    head: dict[str, Any] = {"device": "CPU", "by": "Triton kernels, interpreted", "rows": []}
    if select_device(config.device)[0].type == "cuda":
        return head | {"reason": "the kernels themselves run on this GPU"}
    if not has_triton():
        return head | {"reason": "Triton is not installed; it is part of PyTorch's CUDA builds for Linux"}
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, capture_output=True, text=True, check=False
    )
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
        gradients = gpu.backward(q, k, v, output, lse, gradient.contiguous(), ctx.causal, *into)
        return *gradients, None


if __name__ == "__main__":
    print(json.dumps(attention_rows(Interpreted.apply, torch.device("cpu"), SHAPES, ["fp32"])))
