"""The kernels' work: inputs, the reference implementation, ours, and what has to be moved and computed.

Timings, errors and counts of bytes all go through these cases.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from lmcore.device import device_name, out_of_memory_reason, reset_peak_memory, select_device, set_matmul_precision
from lmcore.fast.kernels.attention import flash_attention, sdpa
from lmcore.fast.kernels.cross_entropy import linear_cross_entropy_gradients
from lmcore.fast.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lmcore.fast.kernels.rope import rope_
from lmcore.fast.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.functional import cross_entropy, scaled_dot_product_attention, silu
from lmcore.model import RMSNorm, RotaryPositionalEmbedding, causal_mask
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.memory.recording import record_cpu
from lmcore.profiling.memory.timeline import levels
from lmcore.profiling.timing import Timer, timed_steps
from lmcore.profiling.workload import Span, Workload

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of activations by precision."""

SMALLEST = 128, 16
"""Context and head size from which `measure_attention_sizes` doubles them."""

ATTENTION = {"plain": None, "sdpa": sdpa, "flash": flash_attention}
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

    def by(self, variant: str) -> Callable[[], Any]:
        """The work by our implementation ("fused"), the reference ("plain") or the compiled one ("compiled")."""
        if variant == "fused":
            return self.ours
        return partial(self.run, torch.compile(self.reference, dynamic=False) if variant == "compiled" else None)


def with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor], *gradients: Tensor) -> tuple[Tensor, ...]:
    """The function's last result, and the gradients of the inputs that require them.

    `gradients` are those of its last results, one for each; none where the result is a scalar.
    """
    result, leaves = function(*inputs), [x for x in inputs if x.requires_grad]
    results = (result if isinstance(result, tuple) else (result,))[-max(1, len(gradients)) :]
    if not leaves:
        return results[-1:]
    of = [gradient.to(x.dtype) for gradient, x in zip(gradients, results, strict=True)] if gradients else None
    return (results[-1].detach(), *torch.autograd.grad(results, leaves, of))


# Operations


def attention(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, causal: bool = True) -> KernelCase:
    """Attention of random (B, H, T, K) queries, keys and values; ours is FlashAttention-2."""
    *leaves, do = (torch.randn(shape, device=device).to(dtype).requires_grad_(i < 3) for i in range(4))
    length = shape[-2]
    mask = causal_mask(length, length, device) if causal else None

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, None if mask is None else mask.to(q.device))

    ours = partial(with_gradients, lambda *qkv: flash_attention(*qkv, causal), leaves, do)
    pairs = length * (length + 1) // 2 if causal else length**2
    flops = 2 * 2 * pairs * do.numel() // length  # a kernel need not compute the pairs that the mask takes away
    return KernelCase("attention", reference, tuple(leaves), (do,), ours, least_bytes=4 * do.nbytes, flops=flops)


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
    return KernelCase("linear and cross-entropy", reference, inputs, (), ours)


def elementwise(config: WorkloadConfig, device: torch.device) -> list[KernelCase]:
    """The elementwise operations of one block of the case's model, both ways, on random inputs in its precision."""
    c, time = config.model, config.model.context_length
    x, branch, dy, qkv, dqkv, ab, dh = (
        torch.randn(config.tokens_per_step, width, device=device).to(DTYPES[config.precision])
        for width in (*[c.d_model] * 3, *[3 * c.d_model] * 2, 2 * c.d_ff, c.d_ff)
    )
    weight = (torch.rand(c.d_model, device=device) + 0.5).requires_grad_()
    layer, positions = RMSNorm(c.d_model, device=device), torch.arange(time, device=device)
    rope = RotaryPositionalEmbedding(c.rope_theta, c.d_k, time, device=device)
    rotated, rotated_back, gated = qkv.clone(), dqkv.clone(), ab.clone()  # what works in place works on copies

    def norm(x: Tensor, weight: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return (total := x + branch), torch.func.functional_call(layer, {"weight": weight}, (total,))

    def our_norm() -> tuple[Tensor, ...]:
        total, y, rstd = rmsnorm_forward(x, weight.detach(), branch=branch)
        dx, partials = rmsnorm_backward(dy, total, weight.detach(), rstd)
        return y, dx, partials.sum(dim=0)

    def heads(qkv: Tensor) -> Tensor:  # of queries and keys, in a joint projection
        return qkv.view(-1, time, 3 * c.num_heads, c.d_k)[:, :, : 2 * c.num_heads].transpose(1, 2)

    def our_rotation() -> tuple[Tensor, ...]:
        rope_(rotated, rope.cos, rope.sin, time)
        rope_(rotated_back, rope.cos, rope.sin, time, inverse=True)
        return heads(rotated), heads(rotated_back)

    def gate(ab: Tensor) -> Tensor:
        a, b = ab.chunk(2, dim=-1)
        return silu(a) * b

    def our_gate() -> tuple[Tensor, ...]:
        return swiglu_forward(gated), swiglu_backward_(dh, gated)

    def turn(qk: Tensor) -> Tensor:
        return rope(qk, positions)

    leaf, qk, leaves = x.clone().requires_grad_(), heads(qkv).detach().requires_grad_(), ab.detach().requires_grad_()
    reset, moved = partial(gated.copy_, ab), x.nbytes
    return [
        # moved: x, branch, sum, y; then sum, dy, dx
        KernelCase("residual sum, RMSNorm", norm, (leaf, weight, branch), (dy,), our_norm, least_bytes=7 * moved),
        # queries and keys in and out, twice
        KernelCase("RoPE of queries and keys", turn, (qk,), (heads(dqkv),), our_rotation, least_bytes=8 * moved),
        # a, b, h; then dh, a, b, da, db
        KernelCase("SwiGLU's gate", gate, (leaves,), (dh,), our_gate, reset, least_bytes=8 * dh.nbytes),
    ]


# Errors and memory


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """`|found - wanted| / |wanted|` by the l2 norm, in float64; without the divisor if that is 0; inf if not finite."""
    wanted = wanted.double()
    difference = (found.detach().to(wanted.device).double() - wanted).norm().item()
    error = difference / (wanted.norm().item() or 1.0)
    return error if math.isfinite(error) else math.inf


def allocated(device: torch.device) -> int:
    """Bytes allocated on the device, of which new peaks are counted from now on; 0 off CUDA."""
    reset_peak_memory(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def call_bytes(function: Callable[[], Any], device: torch.device) -> tuple[int | None, int | None]:
    """The most memory that a call takes at a time, beside what was there before, and what its result holds of it.

    On a GPU by the allocator's counters, on a CPU by the storages of tensors; None where nobody counts it (MPS).
    """
    function()  # compilation and workspaces are not the function's own
    if device.type == "cuda":
        before = allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        most, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return most - before, held - before
    if device.type != "cpu":
        return None, None
    alive = levels(record_cpu(lambda span: function())).sum(axis=1)
    return int(alive.max() - alive[0]), int(alive.iloc[-1] - alive[0])


def measured(function: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Median `seconds` that a call keeps the device busy, and its `extra_bytes` by `call_bytes`."""
    extra_bytes, _ = call_bytes(function, device)  # before the timer takes its buffer
    return {"seconds": Timer(device)(function), "extra_bytes": extra_bytes}


# Tasks of `lmcore.profiling.runner.run_cases`


def measure_attention_sizes(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Causal attention with one head of every size from `SMALLEST` to the case's, by powers of two (CS336 A2).

    Each pass is timed `config.steps` times or more. The result holds `device` and `rows`: `context`, `head_size`,
    `outcome`, `reason`, median seconds of `forward`, `both` and `backward`, `saved_bytes`, what a forward pass
    leaves in memory for the backward pass, and `device_bytes`, the memory of the GPU (None off CUDA). What comes after
    a pass that runs out of memory is missing.
    """
    device, _ = select_device(config.device)
    set_matmul_precision(device, config.precision)
    torch._functorch.config.donated_buffer = False  # a compiled backward pass is to run more than once
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    timer, (length, width), rows = Timer(device), SMALLEST, []
    deque(passes((config.batch_size, 1, length, width), config, timer), 0)  # a process's first times are longer
    while width <= config.model.d_k:
        row = {"context": length, "head_size": width, "outcome": "complete", "reason": None, "device_bytes": capacity}
        try:
            for name, found in passes((config.batch_size, 1, length, width), config, timer):
                row[name] = found
        except (RuntimeError, MemoryError) as error:
            if (reason := out_of_memory_reason(error)) is None:
                raise
            row |= {"outcome": "out of memory", "reason": reason}
        rows.append(row)
        torch.compiler.reset()
        reset_peak_memory(device)
        length *= 2
        if length > config.model.context_length:
            length, width = SMALLEST[0], 2 * width
    return {"device": device_name(device), "rows": rows}


def passes(shape: Sequence[int], config: WorkloadConfig, timer: Timer) -> Iterator[tuple[str, Any]]:
    """Names and seconds of attention's passes on random inputs of this shape, and the memory that lies between two."""
    case = attention(shape, DTYPES[config.precision], timer.device)
    run = ATTENTION[config.model.attention] or case.reference
    run = torch.compile(run, dynamic=False) if config.compile else run
    forward = partial(run, *case.inputs)
    yield "saved_bytes", call_bytes(forward, timer.device)[1]
    yield "forward", timer(forward, least=config.steps)
    yield "both", timer(partial(case.run, run))  # while no other graph is there
    backward = partial(torch.autograd.grad, forward(), case.inputs, case.gradients, retain_graph=True)
    yield "backward", timer(backward, least=config.steps)


def measure_ungraphed(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`lmcore.profiling.timing.measure` of the explicit step without a CUDA graph: kernels are launched one by one."""
    workload = Workload(config)

    def step(span: Span) -> Tensor:
        loss = workload.fused.transformer.forward_backward(workload.inputs, workload.targets)
        workload.optimizer.step()
        return loss

    return timed_steps(step, workload.device, config.warmup_steps, config.steps, graphed=True)
