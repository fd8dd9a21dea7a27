"""What lies between the matrix products of a block, by PyTorch's operations, compiled, and by our kernels."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.config import from_dict
from lmcore.device import device_name, select_device
from lmcore.functional import silu
from lmcore.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lmcore.kernels.rmsnorm.reference import rmsnorm_plain
from lmcore.kernels.rope import rope_
from lmcore.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.model import RotaryPositionalEmbedding
from lmcore.profiling.ceilings import Timer
from lmcore.profiling.kernels.loss import variant_of
from lmcore.profiling.kernels.measuring import activation_dtype
from lmcore.profiling.kernels.traffic import traffic_of
from lmcore.profiling.workload import WorkloadConfig


@dataclass(frozen=True)
class Elementwise:
    """One operation with its backward pass: the definition, differentiated by autograd, and ours, written out."""

    name: str
    definition: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    gradient: Tensor
    """Of the definition's (last) result."""
    ours: Callable[[], Any]
    least_bytes: int
    """What both passes must move: every input and gradient once, nothing twice."""

    def plain(self, run: Callable[..., Any]) -> tuple[Tensor, ...]:
        """Both passes by `run`, which is the definition or what the compiler has made of it."""
        result = run(*self.inputs)
        result = result[-1] if isinstance(result, tuple) else result
        return torch.autograd.grad(result, [x for x in self.inputs if x.requires_grad], self.gradient)


def operations(config: WorkloadConfig, device: torch.device) -> Iterator[Elementwise]:
    """The elementwise operations of one block of the cell's model, on random inputs in its precision."""
    c, dtype, rows = config.model, activation_dtype(config), config.tokens_per_step

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    yield norm(random(rows, c.d_model), random(rows, c.d_model), random(rows, c.d_model))
    yield rotation(random(rows, 3 * c.d_model), config)
    yield gate(random(rows, 2 * c.d_ff), random(rows, c.d_ff))


def norm(x: Tensor, branch: Tensor, dy: Tensor) -> Elementwise:
    """The residual sum, and RMSNorm of it."""
    gain = torch.ones(x.shape[1], device=x.device)

    def ours() -> Any:
        total, _, rstd = rmsnorm_forward(x, gain, branch=branch)
        return rmsnorm_backward(dy, total, gain, rstd)

    leaves = (x.clone().requires_grad_(), gain.clone().requires_grad_())

    def definition(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm_plain(x, gain, branch=branch)

    moved = 4 + 3  # x, branch, sum, y; then dy, the sum, dx
    return Elementwise("residual sum, RMSNorm", definition, leaves, dy, ours, moved * x.numel() * x.element_size())


def rotation(qkv: Tensor, config: WorkloadConfig) -> Elementwise:
    """RoPE of queries and keys in a joint projection."""
    c = config.model
    rope = RotaryPositionalEmbedding(c.rope_theta, c.d_k, c.context_length, device=qkv.device)
    positions = torch.arange(c.context_length, device=qkv.device)
    shape = (config.batch_size, c.context_length, 2 * c.num_heads, c.d_k)

    def definition(qk: Tensor) -> Tensor:
        return rope(qk.view(shape).transpose(1, 2), positions)

    def ours() -> Tensor:
        rope_(qkv, rope.cos, rope.sin, c.context_length)
        return rope_(qkv, rope.cos, rope.sin, c.context_length, inverse=True)

    leaf = qkv[:, : 2 * c.d_model].contiguous().requires_grad_()
    gradient = torch.randn_like(definition(leaf))
    moved = 4 * leaf.numel() * leaf.element_size()  # in and out, both ways
    return Elementwise("RoPE of queries and keys", definition, (leaf,), gradient, ours, moved)


def gate(ab: Tensor, dh: Tensor) -> Elementwise:
    """SiLU(a) * b of SwiGLU."""
    kept = ab.clone()

    def definition(ab: Tensor) -> Tensor:
        a, b = ab.chunk(2, dim=-1)
        return silu(a) * b

    def ours() -> Tensor:
        swiglu_forward(kept)
        return swiglu_backward_(dh, kept)

    moved = (3 + 5) * dh.numel() * dh.element_size()  # a, b, h; then dh, a, b, da, db
    return Elementwise("SwiGLU's gate", definition, (ab.requires_grad_(),), dh, ours, moved)


def measure_elementwise(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times forward and backward pass of each operation: a task of `lmcore.profiling.cells.run_cells`.

    The cell's `ops` and `compile` say by whom. A backward pass in place is repeated on its own results, which shrink
    until a CPU would take its slow path for subnormal numbers: they count as zero meanwhile. The result holds `device`
    and `rows`: `operation`, `seconds`, `least_bytes`, and `eager_bytes`, what the definition moves, counted operation
    by operation.
    """
    device, _ = select_device(config.device)
    torch.manual_seed(config.seed)
    timer, rows = Timer(device), []
    for one in operations(config, device):
        run = torch.compile(one.definition, dynamic=False) if config.compile else one.definition
        function = one.ours if config.ops == "fused" else (lambda one=one, run=run: one.plain(run))
        torch.set_flush_denormal(True)
        seconds, _ = timer(function)
        torch.set_flush_denormal(False)
        eager = traffic_of(lambda one=one: one.plain(one.definition)).total
        rows.append({"operation": one.name, "seconds": seconds, "least_bytes": one.least_bytes, "eager_bytes": eager})
    return {"device": device_name(device), "rows": rows}


def elementwise_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each operation of each record of `measure_elementwise`."""
    rows = []
    for record in records.values():
        config, result = from_dict(WorkloadConfig, record["config"]), record["result"] or {}
        for row in result.get("rows", ()):
            head = {"cell": record["cell"], "variant": variant_of(config), "precision": config.precision}
            rows.append(head | row | {"device": result["device"]})
    return pd.DataFrame(rows, columns=ELEMENTWISE_COLUMNS)


ELEMENTWISE_COLUMNS = [
    "cell", "variant", "precision", "operation", "seconds", "least_bytes", "eager_bytes", "device"
]  # fmt: skip
