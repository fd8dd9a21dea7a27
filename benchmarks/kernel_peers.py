"""Kernels beside their peers: attention, loss and AdamW, as `lmcore.profiling.kernels` has them."""

from collections.abc import Callable
from functools import partial

import torch
from benchmark_cases import CUDNN, FLASH, OURS, Absent, BenchmarkCase, Conditions, Contestant, Rows, timed_rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmcore.fast.kernels.adamw import FusedAdamW
from lmcore.fast.kernels.cross_entropy import linear_cross_entropy
from lmcore.optimizer import AdamW
from lmcore.profiling import kernels

CHECKED_COLUMNS = 64
"""Gradients of so many features are compared."""
BYTES_PER_PARAMETER = 28
"""Parameter, gradient and both moments are read, all but the gradient are written; 4 bytes each."""
OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
ATTENTION = {"plain": "plain", "SDPA": "sdpa", "lmcore flash": "flash"}
"""Attention of the library, by contestant."""


def attention(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """Causal attention of random q, k and v in bf16, forward or in both directions."""
    s, device, both = case.settings, torch.device(conditions.device), case.settings["mode"] == "both"
    torch.manual_seed(0)
    shape = (s["batch_size"], s["heads"], s["context_length"], s["head_size"])
    kernel = kernels.attention(shape, torch.bfloat16, device)
    kernel = kernel if both else kernel.forward

    def build(name: str) -> Contestant:
        return Contestant(partial(kernel.run, attention_by(name, s["context_length"], device, conditions)))

    builders, reference = {name: partial(build, name) for name in s["contestants"]}, None
    if not s.get("unchecked"):  # the last head of the first sequence: of all the scores would be too many
        reference = kernel.run(convert=lambda x: x[0, -1].double())
    flops = kernel.flops * (1 + 2.5 * both)  # backward: five matmuls of (T, T) by (T, K) instead of two
    ideal, options = flops / conditions.peak_rates["bf16_flops_per_second"], {"part": lambda x: x[0, -1]}
    rates = (flops / 1e12, "TFLOP/s", ideal, "measured matmul")
    return timed_rows(case, conditions, builders, *rates, reference=reference, **options)


def attention_by(name: str, length: int, device: torch.device, conditions: Conditions) -> Callable[..., Tensor] | None:
    """A contestant's causal attention; None: the reference. Raises `Absent` for one that this device does not have."""
    if name in ATTENTION:
        return kernels.ATTENTION[ATTENTION[name]]
    if device.type != "cuda":
        raise Absent(f"{name} is measured on a GPU.")
    if name in BACKENDS:
        return sdpa_kernel(BACKENDS[name])(partial(F.scaled_dot_product_attention, is_causal=True))
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device=str(device))
    return partial(conditions.compiled(flex_attention), block_mask=mask)


def loss(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """LM head and cross-entropy forward and backward in bf16. Peak memory is all beyond the inputs: gradients too."""
    s = case.settings
    torch.manual_seed(0)
    sizes = (s["rows"], s["d_model"], s["vocab_size"])
    kernel = kernels.loss(*sizes, torch.bfloat16, torch.device(conditions.device))

    def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def part(result: Tensor) -> Tensor:
        return result[:, :CHECKED_COLUMNS] if result.ndim == 2 else result

    reference = kernel.run(convert=lambda x: x.float() if x.is_floating_point() else x)
    options = {"reference": [part(result).clone() for result in reference], "part": part}
    del reference
    losses = {"eager": eager, "torch.compile": conditions.compiled(eager), OURS: linear_cross_entropy}
    builders = {name: partial(Contestant, partial(kernel.run, function)) for name, function in losses.items()}
    flops = 6 * s["rows"] * s["d_model"] * s["vocab_size"]
    ideal = flops / conditions.peak_rates["bf16_flops_per_second"]
    return timed_rows(case, conditions, builders, flops / 1e12, "TFLOP/s", ideal, "measured matmul", **options)


def adamw(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """One AdamW update of many float32 parameters, clipping left out. The shapes are those of a model's blocks."""
    s = case.settings
    d, f, blocks = s["d_model"], s["d_ff"], s["blocks"]
    shapes = [(d, d)] * 4 * blocks + [(f, d)] * 3 * blocks + [(d,)] * 2 * blocks

    def build(optimizer: Callable, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Contestant:
        """What is compared is by how much three updates change the first parameter."""
        torch.manual_seed(0)  # the first are the same whatever follows
        parameters = []
        for shape in shapes:
            parameters.append(nn.Parameter(torch.randn(shape, device=conditions.device).to(dtype)))
            parameters[-1].grad = (torch.randn(shape, device=conditions.device) / 100).to(dtype)
        before, step = parameters[0].detach().double().clone(), optimizer(parameters, **OPTIMIZER).step
        for _ in range(3):
            step()
        return Contestant(step, results=[parameters[0].detach().double() - before])

    theirs = partial(torch.optim.AdamW, fused=True)
    builders = {"torch fused": partial(build, theirs, shapes), OURS: partial(build, FusedAdamW, shapes)}
    reference = build(AdamW, shapes[:1], torch.float64).results
    moved = BYTES_PER_PARAMETER * sum(map(torch.Size.numel, map(torch.Size, shapes)))
    ideal = moved / conditions.peak_rates["copy_bytes_per_second"]
    return timed_rows(case, conditions, builders, moved / 1e9, "GB/s", ideal, "measured copy", reference=reference)
