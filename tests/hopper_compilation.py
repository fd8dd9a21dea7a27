"""Compiles the Hopper kernels for that chip, on any machine: prints spilled registers and ptxas' warnings, as JSON.

Triton brings its own ptxas. Run in a process without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from lmcore.fast.kernels.attention import hopper
from lmcore.fast.kernels.attention.hopper import attention_backward_kernel, attention_forward_kernel

PTXAS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "ptxas"
FLAT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def tile(rows: int, columns: int, name: str = "bf16", dtype=gl.bfloat16) -> str:
    """The type of a descriptor of tiles."""
    block = [1, 1, rows, columns]
    return f"tensordesc<{name}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)!r}>"


def row(columns: int) -> str:
    return f"tensordesc<fp32[1, {columns}],{FLAT!r}>"


def compiled(kernel, types: dict[str, str], shape: dict[str, int], registers: int, mean_registers: int) -> dict:
    """What ptxas says of one kernel."""
    constants = shape | {"REGISTERS": registers, "PRODUCER_REGISTERS": hopper.PRODUCER_REGISTERS}
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "maxnreg": mean_registers}
    made = triton.compile(
        GluonASTSource(kernel, signature, places, {}), target=GPUTarget("cuda", 90, 32), options=options
    )
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        command = [PTXAS, "-v", "--gpu-name", "sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": kernel.__name__,
        "spilled_bytes": max(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "serialized": "serialized" in said,
        "shared_bytes": made.metadata.shared,
    }


def forward(size: int, length: int, causal: bool) -> dict:
    m, n, stages, registers, mean, _ = hopper.forward_tiles(size, length)
    queries, keys = tile(64, size), tile(n, size)
    types = {"q_desc": queries, "k_desc": keys, "v_desc": keys, "o_desc": queries, "lse_ptr": "*fp32"}
    types |= dict.fromkeys(("all_heads", "heads", "group", "length", "lse_rows"), "i32") | {"scale": "fp32"}
    shape = {"C": m // 64, "BLOCK_N": n, "D": size, "DEPTH": size, "ST": stages, "CAUSAL": causal}
    return compiled(attention_forward_kernel, types, shape, registers, mean)


def backward(size: int, length: int, causal: bool) -> dict:
    m, n, stages, registers, mean, buffers = hopper.backward_tiles(size)
    queries, keys, half = tile(m, size), tile(n, size), tile(n // 2, size)
    types = {"q_desc": queries, "do_desc": queries, "k_desc": keys, "v_desc": keys, "lse_desc": row(m)}
    types |= {"delta_desc": row(m), "dq_desc": tile(m, size // 2, "fp32", gl.float32), "dk_desc": half, "dv_desc": half}
    types |= dict.fromkeys(("all_heads", "heads", "group", "length"), "i32") | {"scale2": "fp32", "scale": "fp32"}
    types |= {"counter": "*i32"}
    shape = {"BLOCK_M": m, "BLOCK_N": n, "D": size, "DEPTH": size, "ST": stages, "KV": buffers, "CAUSAL": causal}
    return compiled(attention_backward_kernel, types, shape, registers, mean)


KERNELS = [
    (forward, 64, 256, True), (forward, 64, 4096, True), (forward, 128, 256, True), (forward, 128, 4096, False),
    (backward, 32, 4096, True), (backward, 64, 4096, False), (backward, 128, 4096, True), (backward, 128, 4096, False),
]  # fmt: skip

for way, size, length, causal in KERNELS:
    print(json.dumps({"size": size, "causal": causal} | way(size, length, causal)))
