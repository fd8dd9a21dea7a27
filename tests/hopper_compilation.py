"""Compiles the Hopper kernels for that chip, on any machine: fails where many registers spill or ptxas warns.

Triton brings its own ptxas. Run in a process without TRITON_INTERPRET; prints the names of the kernels.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lmcore.fast.kernels.attention import hopper

PTXAS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "ptxas"
SHAPES = [(64, 4096, True), (128, 256, False)]
"""Head size, positions, and whether causal."""

launch = JITFunction.run


def compiled(kernel: JITFunction, *arguments, grid, warmup, **options) -> dict:
    """In place of a launch: holds what ptxas says of the kernel."""
    made = launch(kernel, *arguments, grid=grid, warmup=True, **options)
    if "backward" not in kernel.__name__ and "forward" not in kernel.__name__:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        command = [PTXAS, "-v", "--gpu-name", "sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    print(kernel.__name__)
    few = {64: 144, 128: 32}[arguments[0].block_shape[-1]]  # bytes of a thread, nearly all once for each tile of keys
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    assert spilled <= (few if "backward" in kernel.__name__ else 0), said
    assert "serialized" not in said, "matrix products wait for each other"
    assert made.metadata.shared <= 227 * 1024
    return {grid: None}  # what is kept of a launch


JITFunction.run = compiled
place = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
place.get_current_target = lambda: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(place)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
hopper.portable_is_faster = lambda *given, **also: False
for size, length, causal in SHAPES:
    q, k, v, o, dq, dk, dv, do = torch.empty(8, 2, length, 4, size, dtype=torch.bfloat16).transpose(2, 3)
    lse = hopper.forward(q, k, v, causal, o)[1]
    hopper.backward(q, k, v, o, lse, do, causal, dq, dk, dv)
