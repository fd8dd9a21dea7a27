"""What lies between the matmuls of a block, by PyTorch's operations, compiled, and by our kernels."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lmcore.device import device_name, select_device
from lmcore.functional import silu
from lmcore.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lmcore.kernels.rmsnorm.reference import rmsnorm_plain
from lmcore.kernels.rope import rope_
from lmcore.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.model import RotaryPositionalEmbedding
from lmcore.profiling.kernels.loss import variant_of
from lmcore.profiling.kernels.measuring import DTYPES, Contestant, result_rows, with_gradients
from lmcore.profiling.kernels.traffic import traffic_of
from lmcore.profiling.timing import Timer
from lmcore.profiling.workload import WorkloadConfig


@dataclass(frozen=True)
class Elementwise:
    """One operation with its backward pass: the definition, differentiated by autograd, and ours, written out."""

    name: str
    definition: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    """Of the definition's last results."""
    ours: Callable[[], Contestant]
    """Its results are those of `plain`."""
    least_bytes: int
    """What has to move: every input, result and gradient once, nothing twice."""

    def plain(
        self, run: Callable[..., Any] | None = None, convert: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[Tensor, ...]:
        """The last result and the gradients by `run`, which is the definition or what the compiler has made of it.

        `convert` is applied to inputs and gradients.
        """
        inputs = [convert(x.detach()).requires_grad_(x.requires_grad) for x in self.inputs]
        return with_gradients(run or self.definition, inputs, *map(convert, self.gradients))


def operations(config: WorkloadConfig, device: torch.device) -> Iterator[Elementwise]:
    """The elementwise operations of one block of the cell's model, on random inputs in its precision."""
    c, dtype, rows = config.model, DTYPES[config.precision], config.tokens_per_step

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    yield norm(random(rows, c.d_model), random(rows, c.d_model), random(rows, c.d_model))
    yield rotation(random(rows, 3 * c.d_model), c.num_heads, c.context_length)
    yield gate(random(rows, 2 * c.d_ff), random(rows, c.d_ff))


def norm(x: Tensor, branch: Tensor, dy: Tensor, dsum: Tensor | None = None) -> Elementwise:
    """The residual sum of two (N, D) tensors, and RMSNorm of it; `dsum` is the sum's own gradient, if it has one."""
    weight = (torch.rand(x.shape[1], device=x.device) + 0.5).requires_grad_()

    def definition(x: Tensor, weight: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm_plain(x, weight, branch=branch)

    def ours() -> tuple[Tensor, ...]:
        total, y, rstd = rmsnorm_forward(x, weight.detach(), branch=branch)
        dx, partials = rmsnorm_backward(dy, total, weight.detach(), rstd, dsum)
        return y, dx, partials.sum(dim=0)

    inputs, gradients = (x.clone().requires_grad_(), weight, branch), (dy,) if dsum is None else (dsum, dy)
    moved = 4 + 2 + len(gradients)  # x, branch, sum, y; then the sum, dx and what comes in
    name = "residual sum, RMSNorm"
    return Elementwise(name, definition, inputs, gradients, lambda: Contestant(ours), moved * x.nbytes)


def rotation(qkv: Tensor, num_heads: int, context_length: int, backward: bool = True) -> Elementwise:
    """RoPE of queries and keys in a joint (N, 3 D) projection, forward alone or both ways."""
    head_size = qkv.shape[1] // 3 // num_heads
    rope = RotaryPositionalEmbedding(10_000.0, head_size, context_length, device=qkv.device)
    positions = torch.arange(context_length, device=qkv.device)

    def queries_and_keys(qkv: Tensor) -> Tensor:
        return qkv.view(-1, context_length, 3 * num_heads, head_size)[:, :, : 2 * num_heads]

    def definition(qk: Tensor) -> Tensor:
        return rope(qk.transpose(1, 2), positions).transpose(1, 2)

    def ours() -> Contestant:
        work, gradient = qkv.clone(), qkv.flip(0)

        def run() -> tuple[Tensor, ...]:
            rope_(work, rope.cos, rope.sin, context_length)
            if not backward:
                return (queries_and_keys(work),)
            rope_(gradient, rope.cos, rope.sin, context_length, inverse=True)
            return queries_and_keys(work), queries_and_keys(gradient)

        return Contestant(run)

    leaf = queries_and_keys(qkv).detach().requires_grad_(backward)
    gradients = (queries_and_keys(qkv.flip(0)),) if backward else ()
    moved = 2 * (1 + backward) * leaf.nbytes  # in and out
    return Elementwise("RoPE of queries and keys", definition, (leaf,), gradients, ours, moved)


def gate(ab: Tensor, dh: Tensor) -> Elementwise:
    """SiLU(a) * b of SwiGLU, of the halves of an (N, 2 F) tensor."""

    def definition(ab: Tensor) -> Tensor:
        a, b = ab.chunk(2, dim=-1)
        return silu(a) * b

    def ours() -> Contestant:
        work = ab.clone()
        return Contestant(lambda: (swiglu_forward(work), swiglu_backward_(dh, work)), reset=lambda: work.copy_(ab))

    moved = (3 + 5) * dh.nbytes  # a, b, h; then dh, a, b, da, db
    return Elementwise("SwiGLU's gate", definition, (ab.detach().requires_grad_(),), (dh,), ours, moved)


def measure_elementwise(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times forward and backward pass of each operation: a task of `lmcore.profiling.runner.run_cases`.

    The cell's `ops` and `compile` say by whom. The result holds `device` and `rows`: `operation`, `seconds`,
    `least_bytes`, and `eager_bytes`, what the definition moves, counted operation by operation.
    """
    device, _ = select_device(config.device)
    torch.manual_seed(config.seed)
    timer, rows = Timer(device), []
    for one in operations(config, device):
        run = torch.compile(one.definition, dynamic=False) if config.compile else one.definition
        contestant = one.ours() if config.ops == "fused" else Contestant(lambda one=one, run=run: one.plain(run))
        seconds, _ = timer(contestant.run, contestant.reset)
        eager = traffic_of(one.plain).total
        rows.append({"operation": one.name, "seconds": seconds, "least_bytes": one.least_bytes, "eager_bytes": eager})
    return {"device": device_name(device), "rows": rows}


def elementwise_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each operation of each record of `measure_elementwise`."""
    rows = [
        row | {"variant": variant_of(config), "precision": config.precision, "device": result["device"]}
        for row, config, result in result_rows(records)
    ]
    return pd.DataFrame(rows, columns=ELEMENTWISE_COLUMNS)


ELEMENTWISE_COLUMNS = [
    "cell", "variant", "precision", "operation", "seconds", "least_bytes", "eager_bytes", "device"
]  # fmt: skip
