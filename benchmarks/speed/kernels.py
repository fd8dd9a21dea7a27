"""Kernels beside their peers: attention, loss, AdamW and elementwise work, as `lmcore.profiling.kernels` has them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmcore.config import ModelConfig
from lmcore.kernels.cross_entropy import linear_cross_entropy
from lmcore.profiling.kernels import elementwise as operations
from lmcore.profiling.kernels import optimizer as updates
from lmcore.profiling.kernels.attention import BACKWARD, attention_of, causal_flops
from lmcore.profiling.kernels.loss import loss_and_gradients, loss_inputs, plain_loss
from lmcore.profiling.kernels.measuring import Absent, Contestant, with_gradients

from .cells import SWEPT, attention_cell
from .rows import CUDNN, FLASH, OURS, SECONDS_OF_A_MEMORY_ROW, Cell, Conditions, Rows, Work

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

CHECKED_COLUMNS = 64
"""Gradients of so many features are compared."""
BYTES_PER_PARAMETER = 28
"""Parameter, gradient and both moments are read, all but the gradient are written; 4 bytes each."""
OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def attention(cell: Cell, conditions: Conditions) -> Rows:
    """Causal attention of random q, k and v in bf16, forward or in both directions."""
    s, device = cell.settings, torch.device(conditions.device)
    both, length = s["passes"] == "both", s["context_length"]
    torch.manual_seed(0)
    shape = (s["batch_size"], s["heads"], length, s["head_size"])
    q, k, v, do = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    leaves, gradients = [x.requires_grad_(both) for x in (q, k, v)], (do,) if both else ()

    def build(name: str) -> Contestant:
        return Contestant(partial(with_gradients, attention_by(name, length, device, conditions), leaves, *gradients))

    reference = None
    if not s.get("unchecked"):  # the last head of the first sequence: of all the scores would be too many
        wide = [x[0, -1].detach().double().requires_grad_(both) for x in leaves]
        gradient = [x[0, -1].double() for x in gradients]
        reference = with_gradients(attention_of("plain", length, device), wide, *gradient)
    model = ModelConfig(context_length=length, num_heads=s["heads"], d_model=s["heads"] * s["head_size"])
    flops = causal_flops(model, s["batch_size"]) * (1 + BACKWARD * both)
    ideal = flops / conditions.ceilings["bf16_flops_per_second"]
    builders = {name: partial(build, name) for name in s["contestants"]}
    work = Work(builders, flops / 1e12, "TFLOP/s", ideal, "measured matmul", True, reference, lambda x: x[0, -1])
    return work.rows(cell, conditions)


def attention_by(name: str, length: int, device: torch.device, conditions: Conditions) -> Attend:
    """A contestant's causal attention. Raises `Absent` for one that this device does not have."""
    ours = {"plain": "plain", "SDPA": "sdpa", "lmcore flash": "flash"}
    if name in ours:
        return attention_of(ours[name], length, device)
    if name in BACKENDS:
        return partial(by_backend, BACKENDS[name])
    if device.type != "cuda":
        raise Absent("FlexAttention is measured compiled for a GPU.")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device=str(device))
    return partial(conditions.compiled(flex_attention), block_mask=mask)


BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
CONTESTANTS = ("plain", "SDPA", *BACKENDS, "FlexAttention", "lmcore flash")
"""Whom `attention_by` knows."""


def by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention by one of its back ends. Raises `Absent` if that does not serve these inputs."""
    try:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            raise Absent("PyTorch has no such kernel for these inputs on this device.") from error
        raise


def lengths(cell: Cell, conditions: Conditions) -> Rows:
    """Attention at a constant number of tokens, by length; all share the time of one cell."""
    s = cell.settings
    share = replace(conditions, seconds=conditions.seconds / len(s["lengths"]))
    parts = [attention_cell(s["head_size"], n, s["passes"], s["tokens"] // n, s["heads"], SWEPT) for n in s["lengths"]]
    return [row for part in parts for row in attention(part, share)]


def attention_memory(cell: Cell, conditions: Conditions) -> Rows:
    """Attention forward and backward of one sequence, by its length: what the scores cost, and what it is without."""
    s, rows = cell.settings, []
    for length in s["lengths"]:
        part = attention_cell(s["head_size"], length, "both", 1, s["heads"], ("plain", "SDPA", "lmcore flash"))
        part.settings["unchecked"] = True
        part = replace(part, row=f"memory-attention-{length}", group="memory", work=f"{cell.work}: {length:,}")
        rows += attention(part, replace(conditions, seconds=SECONDS_OF_A_MEMORY_ROW))
    return rows


def loss(cell: Cell, conditions: Conditions) -> Rows:
    """LM head and cross-entropy forward and backward in bf16. Peak memory is all beyond the inputs: gradients too."""
    s, device = cell.settings, torch.device(conditions.device)
    torch.manual_seed(0)
    sizes = (s["rows"], s["d_model"], s["vocab_size"])
    x, weight, targets = loss_inputs(*sizes, torch.bfloat16, device)

    def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def part(result: Tensor) -> Tensor:
        return result[:, :CHECKED_COLUMNS] if result.ndim == 2 else result

    wide = (tensor.detach().float().requires_grad_() for tensor in (x, weight))
    reference = [part(result).clone() for result in loss_and_gradients(plain_loss, *wide, targets)]
    flops = 6 * s["rows"] * s["d_model"] * s["vocab_size"]
    ideal = flops / conditions.ceilings["bf16_flops_per_second"]
    losses = {"eager": eager, "torch.compile": conditions.compiled(eager), OURS: linear_cross_entropy}
    runs = {name: partial(loss_and_gradients, loss, x, weight, targets) for name, loss in losses.items()}
    builders = {name: partial(Contestant, run) for name, run in runs.items()}
    work = Work(builders, flops / 1e12, "TFLOP/s", ideal, "measured matmul", True, reference, part)
    return work.rows(cell, conditions)


def optimizer(cell: Cell, conditions: Conditions) -> Rows:
    """One AdamW update of many float32 parameters, clipping left out. The shapes are those of a model's blocks."""
    s, device = cell.settings, torch.device(conditions.device)
    d, f, blocks = s["d_model"], s["d_ff"], s["blocks"]
    shapes = [(d, d)] * 4 * blocks + [(f, d)] * 3 * blocks + [(d,)] * 2 * blocks

    def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        torch.manual_seed(0)  # the first are the same whatever follows
        made = []
        for shape in shapes:
            made.append(nn.Parameter(torch.randn(shape, device=device).to(dtype)))
            made[-1].grad = (torch.randn(shape, device=device) / 100).to(dtype)
        return made

    def build(update: Callable, *wanted: Any) -> Contestant:
        """What is compared is by how much three updates change the first parameter."""
        made = parameters(*wanted)
        before, step = made[0].detach().double(), update(made, **OPTIMIZER)
        for _ in range(3):
            step()
        return Contestant(step, results=[made[0].detach().double() - before])

    moved = BYTES_PER_PARAMETER * sum(torch.Size(shape).numel() for shape in shapes)
    builders = {
        "torch fused": partial(build, updates.torch_fused, shapes),
        OURS: partial(build, updates.ours, shapes),
    }
    reference = build(updates.plain, shapes[:1], torch.float64).results
    ideal = moved / conditions.ceilings["copy_bytes_per_second"]
    return Work(builders, moved / 1e9, "GB/s", ideal, "measured copy", reference=reference).rows(cell, conditions)


def elementwise(cell: Cell, conditions: Conditions) -> Rows:
    """A kernel between the matmuls in bf16: what torch.compile makes of the plain definition, and ours."""
    s = cell.settings
    torch.manual_seed(0)

    def random(width: int) -> Tensor:
        return torch.randn(s["rows"], width, device=conditions.device).bfloat16()

    if s["kernel"] == "rmsnorm":  # with the gradient of the residual stream, which the backward pass adds
        one = operations.norm(*(random(s["d_model"]) for _ in range(4)))
    elif s["kernel"] == "rope":
        one = operations.rotation(random(3 * s["heads"] * s["head_size"]), s["heads"], s["context_length"], False)
    else:
        one = operations.gate(random(2 * s["d_ff"]), random(s["d_ff"]))

    theirs = partial(one.plain, conditions.compiled(one.definition))
    builders = {"torch.compile": partial(Contestant, theirs), OURS: one.ours}
    reference, moved = one.plain(convert=Tensor.float), one.least_bytes
    ideal = moved / conditions.ceilings["copy_bytes_per_second"]
    return Work(builders, moved / 1e9, "GB/s", ideal, "measured copy", reference=reference).rows(cell, conditions)
