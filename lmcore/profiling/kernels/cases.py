"""The kernels' work as cases: inputs, the reference implementation, ours, and what has to be moved and computed.

Timing, parity (`parity`) and bytes moved all go through these cases, in notebook 07 as in `benchmarks/`.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from lmcore.config import ModelConfig
from lmcore.device import device_name, out_of_memory_reason, reset_peak_memory
from lmcore.functional import cross_entropy, scaled_dot_product_attention, silu
from lmcore.kernels.attention import flash_attention
from lmcore.kernels.cross_entropy import CHUNK_BYTES, linear_cross_entropy_gradients
from lmcore.kernels.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lmcore.kernels.rmsnorm.reference import rmsnorm_plain
from lmcore.kernels.rope import rope_
from lmcore.kernels.sdpa import fused_causal_attention
from lmcore.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.model import RotaryPositionalEmbedding, causal_mask
from lmcore.profiling.kernels.bytes_moved import BytesMoved, moved_by
from lmcore.profiling.kernels.measuring import DTYPES, Contestant, allocated, begin, measured, with_gradients
from lmcore.profiling.timing import LEAST, Timer
from lmcore.profiling.workload import WorkloadConfig, workload_config

BACKWARD = 2.5
"""FLOPs of attention's backward pass for each of its forward pass: five matmuls of (T, T) by (T, K), instead of two."""

SMALLEST = 128, 16
"""Context and head size from which `measure_attention_sizes` doubles them."""

CHUNKS = 8
"""Chunks of losses that the library would take in one, so that small ones show what large ones gain."""

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
    ours: Callable[[], Contestant]
    """Builds our implementation, which returns what `run` returns."""
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

    def contestant(self, config: WorkloadConfig) -> Contestant:
        """Ours, the compiled reference or the reference itself, as `ops` and `compile` of the benchmark case say."""
        if config.ops == "fused":
            return self.ours()
        compiled = torch.compile(self.reference, dynamic=False) if config.compile else None
        return Contestant(partial(self.run, compiled))


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

    @functools.cache
    def mask(device: torch.device) -> Tensor | None:
        return causal_mask(length, length, device) if causal else None

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask(q.device))

    def ours() -> Contestant:
        return Contestant(partial(with_gradients, lambda *qkv: attend(*qkv, causal), leaves, do))

    pairs = length * (length + 1) // 2 if causal else length**2
    flops = 2 * 2 * pairs * do.numel() // length  # a kernel need not compute the pairs that the mask takes away
    results = ("O", "dQ", "dK", "dV")
    return KernelCase("attention", reference, tuple(leaves), (do,), results, ours, 4 * do.nbytes, flops)


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
    name, results = "linear and cross-entropy", ("loss", "dx", "dW")
    return KernelCase(name, reference, inputs, (), results, lambda: Contestant(ours))


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


def norm(x: Tensor, branch: Tensor, dy: Tensor, dsum: Tensor | None = None) -> KernelCase:
    """The residual sum of two (N, D) tensors, and RMSNorm of it; `dsum` is the sum's own gradient, if it has one."""
    weight = (torch.rand(x.shape[1], device=x.device) + 0.5).requires_grad_()

    def reference(x: Tensor, weight: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm_plain(x, weight, branch=branch)

    def ours() -> tuple[Tensor, ...]:
        total, y, rstd = rmsnorm_forward(x, weight.detach(), branch=branch)
        dx, partials = rmsnorm_backward(dy, total, weight.detach(), rstd, dsum)
        return y, dx, partials.sum(dim=0)

    inputs, gradients = (x.clone().requires_grad_(), weight, branch), (dy,) if dsum is None else (dsum, dy)
    moved = (4 + 2 + len(gradients)) * x.nbytes  # x, branch, sum, y; then the sum, dx and what comes in
    name, results = "residual sum, RMSNorm", ("y", "dx", "dg")
    return KernelCase(name, reference, inputs, gradients, results, lambda: Contestant(ours), moved)


def rotation(qkv: Tensor, num_heads: int, context_length: int, backward: bool = True) -> KernelCase:
    """RoPE of queries and keys in a joint (N, 3 D) projection, forward alone or both ways."""
    head_size = qkv.shape[1] // 3 // num_heads
    rope = RotaryPositionalEmbedding(10_000.0, head_size, context_length, device=qkv.device)
    positions = torch.arange(context_length, device=qkv.device)

    def queries_and_keys(qkv: Tensor) -> Tensor:
        return qkv.view(-1, context_length, 3 * num_heads, head_size)[:, :, : 2 * num_heads]

    def reference(qk: Tensor) -> Tensor:
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
    gradients, results = ((queries_and_keys(qkv.flip(0)),), ("qk", "dqk")) if backward else ((), ("qk",))
    moved = 2 * len(results) * leaf.nbytes  # in and out
    return KernelCase("RoPE of queries and keys", reference, (leaf,), gradients, results, ours, moved)


def gate(ab: Tensor, dh: Tensor) -> KernelCase:
    """SiLU(a) * b of SwiGLU, of the halves of an (N, 2 F) tensor."""

    def reference(ab: Tensor) -> Tensor:
        a, b = ab.chunk(2, dim=-1)
        return silu(a) * b

    def ours() -> Contestant:
        work = ab.clone()
        return Contestant(lambda: (swiglu_forward(work), swiglu_backward_(dh, work)), reset=lambda: work.copy_(ab))

    moved = (3 + 5) * dh.nbytes  # a, b, h; then dh, a, b, da, db
    return KernelCase("SwiGLU's gate", reference, (ab.detach().requires_grad_(),), (dh,), ("h", "dab"), ours, moved)


# Tasks of `lmcore.profiling.runner.run_cases` and the benchmark cases that they are run on


def attention_cases(
    size: str, contexts: Sequence[int], kinds: Sequence[str] = tuple(ATTENTION), **changes: Any
) -> dict[str, WorkloadConfig]:
    """Every kind of attention at every context, in the heads of a named size: medium-4096-bf16-flash and so on."""
    return {
        f"{case.size}-{context}-{case.precision}-{kind}": case
        for context, kind in itertools.product(contexts, kinds)
        for case in [workload_config(size, context, attention=kind, mode="forward_backward", **changes)]
    }


def variant_cases(size: str, context_length: int, compiled: bool, **changes: Any) -> dict[str, WorkloadConfig]:
    """One case with plain operations, one with fused ones, and with `compiled` one that torch.compile has made."""
    wanted = {"plain": {}, **({"compiled": {"compile": True}} if compiled else {}), "fused": {"ops": "fused"}}
    return {
        f"{size}-{context_length}-{name}": workload_config(size, context_length, **changes, **switches)
        for name, switches in wanted.items()
    }


def measure_attention(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Time and memory of one causal attention of the case's shape.

    The result holds `device`, and for `forward` (inference) and `both` passes `seconds` and `extra_bytes`: the most
    memory beside queries, keys, values and the output's gradient; outputs and gradients are part of it.
    """
    device, attend = begin(config), ATTENTION[config.model.attention]
    case = attention_layer(config.model, config.batch_size, DTYPES[config.precision], device)
    modes = {"forward": case.forward, "both": case}
    found = {mode: measured(partial(one.run, attend), device) for mode, one in modes.items()}
    return {"device": device_name(device)} | found


def size_cases(
    batch_size: int, context: int, head_size: int, precisions: Sequence[str], kinds: Sequence[str], steps: int = LEAST
) -> dict[str, WorkloadConfig]:
    """For `measure_attention_sizes`: each kind of attention, or `compiled`, in each precision up to these sizes."""
    shape = {"d_model": head_size, "num_heads": 1, "num_layers": 1, "d_ff": head_size, "vocab_size": 2}
    return {
        f"batch{batch_size}-{precision}-{kind}": WorkloadConfig(
            model=ModelConfig(context_length=context, attention="plain" if kind == "compiled" else kind, **shape),
            batch_size=batch_size, precision=precision, compile=kind == "compiled", mode="forward_backward",
            steps=steps,
        )
        for precision, kind in itertools.product(precisions, kinds)
    }  # fmt: skip


def measure_attention_sizes(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Causal attention with one head of every size from `SMALLEST` to the case's, by powers of two (CS336 A2).

    Each pass is timed `config.steps` times or more. The result holds `device`, `device_bytes`, the memory of the GPU
    (None off CUDA), and `rows`: `context`, `head_size`, `outcome`, `reason`, median seconds of `forward`, `backward`
    and `both`, and `saved_bytes`, what a forward pass leaves in memory for the backward pass.
    """
    device, rows, kind = begin(config), [], config.model.attention
    timer, (length, width) = Timer(device), SMALLEST
    torch._functorch.config.donated_buffer = False  # a compiled backward pass is to run more than once
    while width <= config.model.d_k:
        while length <= config.model.context_length:
            row = {"context": length, "head_size": width, "outcome": "complete", "reason": None}
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
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {"device": device_name(device), "device_bytes": capacity, "rows": rows}


def keep(kept: weakref.WeakSet[Tensor], tensor: Tensor) -> Tensor:
    """Notes a saved tensor for as long as autograd holds it."""
    saved = tensor.detach()  # an operation that saved its own result with its node would never be freed
    kept.add(saved)
    return saved


def passes(shape: Sequence[int], config: WorkloadConfig, kind: str, timer: Timer) -> dict[str, Any]:
    """Seconds of attention's passes on random inputs of this shape, and the memory that lies between the two."""
    case = attention(shape, DTYPES[config.precision], timer.device)
    run = partial(scaled_dot_product_attention, mask=causal_mask(shape[-2], shape[-2], timer.device))
    run = run if kind == "plain" else lambda *qkv: ATTENTION[kind](*qkv, True)
    run = torch.compile(run, dynamic=False) if config.compile else run
    run(*case.inputs)  # compiles
    before, kept = allocated(timer.device), weakref.WeakSet()  # off CUDA what autograd holds is counted, by its storage
    with torch.autograd.graph.saved_tensors_hooks(partial(keep, kept), lambda tensor: tensor):
        output = run(*case.inputs)
    timer.synchronize()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    new = sum(size for place, size in storages.items() if place not in {x.data_ptr() for x in case.inputs})
    saved = allocated(timer.device) - before if timer.cuda else new
    backward = partial(torch.autograd.grad, output, case.inputs, case.gradients, retain_graph=True)
    return {
        "forward": timer(partial(run, *case.inputs), least=config.steps)[0],
        "backward": timer(backward, least=config.steps)[0],
        "both": timer(partial(case.run, run))[0],
        "saved_bytes": saved,
    }


def measure_loss(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Time and memory of head and loss of the case's size with both gradients.

    The result holds `device`, `seconds` and `extra_bytes`, of which the gradients of activations and head are a part;
    and `chunk_rows`, None where the library's own chunks were taken.
    """
    device, dtype, rows = begin(config), DTYPES[config.precision], config.tokens_per_step
    vocab_size = config.model.vocab_size
    chunk = max(1, rows // CHUNKS) if rows * vocab_size * dtype.itemsize <= CHUNK_BYTES else None
    case = loss(rows, config.model.d_model, vocab_size, dtype, device, chunk)
    return {"device": device_name(device), "chunk_rows": chunk} | measured(case.contestant(config).run, device)


def measure_elementwise(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times forward and backward pass of each operation of `elementwise`.

    The result holds `device` and `rows`: `operation`, `seconds`, `least_bytes`, and `eager_bytes`, what the reference
    moves, counted operation by operation.
    """
    device, rows = begin(config), []
    timer = Timer(device)
    for case in elementwise(config, device):
        contestant = case.contestant(config)
        row = {"operation": case.name, "seconds": timer(contestant.run, contestant.reset)[0]}
        rows.append(row | {"least_bytes": case.least_bytes, "eager_bytes": case.moved().total})
    return {"device": device_name(device), "rows": rows}
