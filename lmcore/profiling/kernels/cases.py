"""The kernels' work as cases: inputs, the reference implementation, ours, and what has to be moved and computed.

Timing, parity and bytes moved all go through these cases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from lmcore.config import ModelConfig
from lmcore.device import device_name, out_of_memory_reason, reset_peak_memory
from lmcore.fast.kernels.attention import flash_attention
from lmcore.fast.kernels.cross_entropy import linear_cross_entropy_gradients
from lmcore.fast.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lmcore.fast.kernels.rope import rope_
from lmcore.fast.kernels.sdpa import fused_causal_attention
from lmcore.fast.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.functional import cross_entropy, scaled_dot_product_attention, silu
from lmcore.model import RMSNorm, RotaryPositionalEmbedding, causal_mask
from lmcore.profiling.kernels.bytes_moved import BytesMoved, moved_by
from lmcore.profiling.kernels.measuring import DTYPES, begin, call_bytes, with_gradients
from lmcore.profiling.timing import Timer, timed_steps
from lmcore.profiling.workload import Span, Workload, WorkloadConfig, no_span

BACKWARD = 2.5
"""FLOPs of attention's backward pass for each of its forward pass: five matmuls of (T, T) by (T, K), instead of two."""

SMALLEST = 128, 16
"""Context and head size from which `measure_attention_sizes` doubles them."""

ATTENTION = {"plain": None, "sdpa": fused_causal_attention, "flash": flash_attention}
"""Causal attention of (..., T, K) queries, keys and values by `ModelConfig.attention`; None: the reference."""


@dataclass(frozen=True)
class KernelCase:
    """One operation on given inputs, with its backward pass."""

    name: str
    reference: Callable[..., Any]
    """The reference implementation: a function of the inputs, differentiated by autograd."""
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    """Of its last results; none where the result is a scalar."""
    results: tuple[str, ...]
    """Names of what `run` returns."""
    ours: Callable[[], Any]
    """Our implementation, which returns what `run` returns."""
    reset: Callable[[], Any] | None = None
    """Called, untimed, before every call of `ours` if that works in place."""
    least_bytes: int = 0
    """What has to move: every input, result and gradient once (of attention: of the forward pass)."""
    flops: int = 0
    """Of attention's forward pass."""

    def run(
        self, function: Callable[..., Any] | None = None, convert: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[Tensor, ...]:
        """The last result and the gradients by `function`, by default the reference.

        `convert` is applied to inputs and gradients.
        """
        inputs = [convert(x.detach()).requires_grad_(x.requires_grad) for x in self.inputs]
        return with_gradients(function or self.reference, inputs, *map(convert, self.gradients))

    @property
    def forward(self) -> "KernelCase":
        """The same without gradients."""
        return replace(self, inputs=tuple(x.detach() for x in self.inputs), gradients=())

    def moved(self) -> BytesMoved:
        """What the reference moves, operation by operation."""
        self.run()  # a mask is made once
        return moved_by(self.run)

    def by(self, variant: str) -> Callable[[], Any]:
        """The work by our implementation ("fused"), the reference ("plain") or the compiled one ("compiled")."""
        if variant == "fused":
            return self.ours
        compiled = torch.compile(self.reference, dynamic=False) if variant == "compiled" else None
        return partial(self.run, compiled)


# Operations


def attention(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool = True,
    attend: Callable[..., Tensor] = flash_attention,
) -> KernelCase:
    """Attention of random (B, H, T, K) queries, keys and values; `attend(q, k, v, causal)` is ours."""
    *leaves, do = (torch.randn(shape, device=device).to(dtype).requires_grad_(i < 3) for i in range(4))
    length = shape[-2]

    @cache
    def mask(device: torch.device) -> Tensor | None:
        return causal_mask(length, length, device) if causal else None

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask(q.device))

    ours = partial(with_gradients, lambda *qkv: attend(*qkv, causal), leaves, do)
    pairs = length * (length + 1) // 2 if causal else length**2
    flops = 2 * 2 * pairs * do.numel() // length  # a kernel need not compute the pairs that the mask takes away
    results = ("O", "dQ", "dK", "dV")
    sizes = {"least_bytes": 4 * do.nbytes, "flops": flops}
    return KernelCase("attention", reference, tuple(leaves), (do,), results, ours, **sizes)


def attention_layer(
    model: ModelConfig, batch_size: int, dtype: torch.dtype, device: torch.device | str = "meta"
) -> KernelCase:
    """Causal attention of one layer; by default on tensors without memory, to count what it moves and computes."""
    shape = (batch_size, model.num_heads, model.context_length, model.d_k)
    return attention(shape, dtype, torch.device(device))


def loss(
    rows: int, d_model: int, vocab_size: int, dtype: torch.dtype, device: torch.device, chunk_rows: int | None = None
) -> KernelCase:
    """LM head and mean cross-entropy; the reference materializes the (rows, vocab_size) logits."""
    x = torch.randn(rows, d_model, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, d_model, device=device) / d_model**0.5).to(dtype).requires_grad_()
    inputs = x, weight, torch.randint(vocab_size, (rows,), device=device)

    def reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(x @ weight.T, targets)

    ours = partial(linear_cross_entropy_gradients, *(tensor.detach() for tensor in inputs), chunk_rows=chunk_rows)
    return KernelCase("linear and cross-entropy", reference, inputs, (), ("loss", "dx", "dW"), ours)


def elementwise(config: WorkloadConfig, device: torch.device) -> list[KernelCase]:
    """The elementwise operations of one block of the case's model, on random inputs in its precision."""
    c, dtype, rows = config.model, DTYPES[config.precision], config.tokens_per_step

    def random(width: int) -> Tensor:
        return torch.randn(rows, width, device=device).to(dtype)

    return [
        norm(random(c.d_model), random(c.d_model), random(c.d_model)),
        rotation(random(3 * c.d_model), c.num_heads, c.context_length),
        gate(random(2 * c.d_ff), random(c.d_ff)),
    ]


def norm(x: Tensor, branch: Tensor, dy: Tensor) -> KernelCase:
    """The residual sum of two (N, D) tensors, and RMSNorm of it."""
    weight = (torch.rand(x.shape[1], device=x.device) + 0.5).requires_grad_()
    layer = RMSNorm(x.shape[1], device=x.device)

    def reference(x: Tensor, weight: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, torch.func.functional_call(layer, {"weight": weight}, (total,))

    def ours() -> tuple[Tensor, ...]:
        total, y, rstd = rmsnorm_forward(x, weight.detach(), branch=branch)
        dx, partials = rmsnorm_backward(dy, total, weight.detach(), rstd)
        return y, dx, partials.sum(dim=0)

    inputs, moved = (x.clone().requires_grad_(), weight, branch), 7 * x.nbytes  # x, branch, sum, y; then sum, dy, dx
    name, results = "residual sum, RMSNorm", ("y", "dx", "dg")
    return KernelCase(name, reference, inputs, (dy,), results, ours, least_bytes=moved)


def rotation(qkv: Tensor, num_heads: int, context_length: int) -> KernelCase:
    """RoPE of queries and keys in a joint (N, 3 D) projection, both ways."""
    head_size = qkv.shape[1] // 3 // num_heads
    rope = RotaryPositionalEmbedding(10_000.0, head_size, context_length, device=qkv.device)
    positions = torch.arange(context_length, device=qkv.device)

    def queries_and_keys(qkv: Tensor) -> Tensor:
        return qkv.view(-1, context_length, 3 * num_heads, head_size)[:, :, : 2 * num_heads]

    def reference(qk: Tensor) -> Tensor:
        return rope(qk.transpose(1, 2), positions).transpose(1, 2)

    work, gradient = qkv.clone(), qkv.flip(0)

    def ours() -> tuple[Tensor, ...]:
        rope_(work, rope.cos, rope.sin, context_length)
        rope_(gradient, rope.cos, rope.sin, context_length, inverse=True)
        return queries_and_keys(work), queries_and_keys(gradient)

    leaf, gradients = queries_and_keys(qkv).detach().requires_grad_(), (queries_and_keys(qkv.flip(0)),)
    moved = 4 * leaf.nbytes  # in and out, twice
    name, results = "RoPE of queries and keys", ("qk", "dqk")
    return KernelCase(name, reference, (leaf,), gradients, results, ours, least_bytes=moved)


def gate(ab: Tensor, dh: Tensor) -> KernelCase:
    """SiLU(a) * b of SwiGLU, of the halves of an (N, 2 F) tensor."""

    def reference(ab: Tensor) -> Tensor:
        a, b = ab.chunk(2, dim=-1)
        return silu(a) * b

    work = ab.clone()

    def ours() -> tuple[Tensor, ...]:
        return swiglu_forward(work), swiglu_backward_(dh, work)

    inputs, moved = (ab.detach().requires_grad_(),), (3 + 5) * dh.nbytes  # a, b, h; then dh, a, b, da, db
    reset = partial(work.copy_, ab)
    return KernelCase("SwiGLU's gate", reference, inputs, (dh,), ("h", "dab"), ours, reset, least_bytes=moved)


# Tasks of `lmcore.profiling.runner.run_cases`


def measure_attention_sizes(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Causal attention with one head of every size from `SMALLEST` to the case's, by powers of two (CS336 A2).

    Each pass is timed `config.steps` times or more. The result holds `device` and `rows`: `context`, `head_size`,
    `outcome`, `reason`, median seconds of `forward`, `backward` and `both`, `saved_bytes`, what a forward pass
    leaves in memory for the backward pass, and `device_bytes`, the memory of the GPU (None off CUDA).
    """
    device, rows, kind = begin(config), [], config.model.attention
    timer, (length, width) = Timer(device), SMALLEST
    torch._functorch.config.donated_buffer = False  # a compiled backward pass is to run more than once
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    while width <= config.model.d_k:
        while length <= config.model.context_length:
            row = {"context": length, "head_size": width, "outcome": "complete", "reason": None}
            row |= {"device_bytes": capacity}
            try:
                rows.append(row | passes((config.batch_size, 1, length, width), config, kind, timer))
            except (RuntimeError, MemoryError) as error:
                if (reason := out_of_memory_reason(error)) is None:
                    raise
                rows.append(row | {"outcome": "out of memory", "reason": reason})
            torch.compiler.reset()
            reset_peak_memory(device)
            length *= 2
        length, width = SMALLEST[0], 2 * width
    return {"device": device_name(device), "rows": rows}


def passes(shape: Sequence[int], config: WorkloadConfig, kind: str, timer: Timer) -> dict[str, Any]:
    """Seconds of attention's passes on random inputs of this shape, and the memory that lies between the two."""
    case = attention(shape, DTYPES[config.precision], timer.device)
    run = partial(scaled_dot_product_attention, mask=causal_mask(shape[-2], shape[-2], timer.device))
    run = run if kind == "plain" else lambda *qkv: ATTENTION[kind](*qkv, True)
    run = torch.compile(run, dynamic=False) if config.compile else run
    forward = partial(run, *case.inputs)
    saved, output = call_bytes(forward, timer.device)[1], forward()  # in this order: memory for one graph at a time
    backward = partial(torch.autograd.grad, output, case.inputs, case.gradients, retain_graph=True)
    return {
        "forward": timer(forward, least=config.steps)[0],
        "backward": timer(backward, least=config.steps)[0],
        "both": timer(partial(case.run, run))[0],
        "saved_bytes": saved,
    }


class Ungraphed(Workload):
    """The explicit step whose kernels are launched one by one."""

    def step(self, span: Span = no_span) -> Tensor:
        """Forward and backward pass, then the update. Returns the loss."""
        loss = self.fused.transformer.forward_backward(self.inputs, self.targets)
        self.optimizer.step()
        return loss


def measure_ungraphed(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`lmcore.profiling.timing.measure` of the explicit step without a CUDA graph."""
    return timed_steps(Ungraphed, config)
