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
from lmcore.fast.muon import FusedMuon
from lmcore.optimizer import AdamW, Muon
from lmcore.profiling import kernels

CHECKED_COLUMNS = 64
"""Gradients of so many features are compared."""
BYTES_PER_PARAMETER = 28
"""Parameter, gradient and both moments are read, all but the gradient are written; 4 bytes each."""
OPTIMIZER = {"lr": 1e-4, "weight_decay": 0.1}
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
        return Contestant(partial(kernel.run, attention_by(name, device)))

    builders, reference = {name: partial(build, name) for name in s["contestants"]}, None
    if not s.get("unchecked"):  # the last head of the first sequence: of all the scores would be too many
        reference = kernel.run(convert=lambda x: x[0, -1].double())
    flops = kernel.flops * (1 + 2.5 * both)  # backward: five matmuls of (T, T) by (T, K) instead of two
    rates = (flops / 1e12, "TFLOP/s", flops / conditions.peak_rates["bf16_flops_per_second"], "measured matmul")
    return timed_rows(case, conditions, builders, *rates, reference=reference, part=lambda x: x[0, -1])


def attention_by(name: str, device: torch.device) -> Callable[..., Tensor] | None:
    """A contestant's causal attention; None: the reference. Raises `Absent` for one that this device does not have."""
    if name in ATTENTION:
        return kernels.ATTENTION[ATTENTION[name]]
    if device.type != "cuda":
        raise Absent(f"{name} is measured on a GPU.")
    if name in BACKENDS:
        return sdpa_kernel(BACKENDS[name])(partial(F.scaled_dot_product_attention, is_causal=True))
    from flash_attn.cute import flash_attn_func  # FlashAttention-4, whose tensors are (B, T, H, K)

    def by_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return by_position


def host(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """What an eager call of causal attention, or of the loss, which autograd records, costs on the host: many of so
    little work that the GPU waits, back to back; with its backward pass if the mode is both."""
    device, both = torch.device(conditions.device), case.settings["mode"] == "both"
    torch.manual_seed(0)
    kernel = kernels.attention((1, 2, 128, 64), torch.bfloat16, device)
    functions = {name: partial(attention_by, name, device) for name in case.settings["contestants"]}
    if "loss" in case.row:
        kernel, functions = kernels.loss(128, 64, 256, torch.bfloat16, device), losses(conditions)

    def build(name: str) -> Contestant:
        function = functions[name]()
        if both:
            return Contestant(partial(kernels.with_gradients, function, kernel.inputs, *kernel.gradients))
        return Contestant(lambda: [function(*kernel.inputs).detach()])

    builders = {name: partial(build, name) for name in functions}
    reference = (kernel if both else kernel.forward).run(convert=lambda x: x.double() if x.is_floating_point() else x)
    return timed_rows(case, conditions, builders, 1.0, "calls/s", None, "", alone=False, reference=reference)


def losses(conditions: Conditions) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """LM head and loss by each contestant: makers of functions of activations, weight and targets."""

    def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def liger() -> Callable[..., Tensor]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        found = LigerFusedLinearCrossEntropyLoss()
        return lambda x, weight, targets: found(weight, x, targets)

    def cut() -> Callable[..., Tensor]:
        from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

        return cut_cross_entropy

    made = {"eager": lambda: eager, "torch.compile": lambda: conditions.compiled(eager), "Liger": liger}
    return made | {"Cut Cross-Entropy": cut, OURS: lambda: linear_cross_entropy}


def loss(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """LM head and cross-entropy forward and backward in bf16. Peak memory is all beyond the inputs: gradients too."""
    s = case.settings
    torch.manual_seed(0)
    sizes = (s["rows"], s["d_model"], s["vocab_size"])
    kernel = kernels.loss(*sizes, torch.bfloat16, torch.device(conditions.device))

    def part(result: Tensor) -> Tensor:
        return result[:, :CHECKED_COLUMNS] if result.ndim == 2 else result

    exact = kernel.run(convert=lambda x: x.float() if x.is_floating_point() else x)
    reference, exact = [part(result).clone() for result in exact], None
    builders = {
        name: lambda make=make: Contestant(partial(kernel.run, make())) for name, make in losses(conditions).items()
    }
    flops = 6 * s["rows"] * s["d_model"] * s["vocab_size"]
    ideal = flops / conditions.peak_rates["bf16_flops_per_second"]
    rates = (flops / 1e12, "TFLOP/s", ideal, "measured matmul")
    return timed_rows(case, conditions, builders, *rates, reference=reference, part=part)


def shapes_of(case: BenchmarkCase) -> list[tuple[int, ...]]:
    """Matrices of a model's blocks."""
    d, f, blocks = (case.settings[name] for name in ("d_model", "d_ff", "blocks"))
    return [(d, d)] * 4 * blocks + [(f, d)] * 3 * blocks


def updates(
    device: str, optimizer: Callable, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Contestant:
    """An optimizer of parameters of these shapes; what is compared is by how much three updates change the first."""
    torch.manual_seed(0)  # the first are the same whatever follows
    parameters = []
    for shape in shapes:
        parameters.append(nn.Parameter(torch.randn(shape, device=device).to(dtype)))
        parameters[-1].grad = (torch.randn(shape, device=device) / 100).to(dtype)
    before, step = parameters[0].detach().double().clone(), optimizer(parameters).step
    for _ in range(3):
        step()
    return Contestant(step, results=[parameters[0].detach().double() - before])


def muon(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """Muon updates, as large as AdamW's, of the float32 matrices of a model's blocks, without clipping.

    They run back to back, launches included: PyTorch's has more of them than can wait for a GPU.
    """
    settings, shapes = OPTIMIZER | {"momentum": 0.95}, shapes_of(case)

    def theirs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **settings)

    def plain(parameters: list[nn.Parameter], kind: type[AdamW] = Muon) -> torch.optim.Optimizer:
        return kind([{"params": parameters, "orthogonalize": True}], **settings)

    kinds = {"torch.optim.Muon": theirs, "lmcore plain": plain, OURS: partial(plain, kind=FusedMuon)}
    update = partial(updates, conditions.device)
    builders = {name: partial(update, kind, shapes) for name, kind in kinds.items()}
    amount = sum(map(torch.Size.numel, map(torch.Size, shapes))) / 1e6
    reference = update(plain, shapes[:1], torch.float64).results
    rates = (amount, "million parameters/s", None, "")
    return timed_rows(case, conditions, builders, *rates, alone=False, reference=reference)


def adamw(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """One AdamW update of many float32 parameters, clipping left out. The shapes are those of a model's blocks."""
    shapes = shapes_of(case) + [(case.settings["d_model"],)] * 2 * case.settings["blocks"]
    update = partial(updates, conditions.device)
    theirs, settings = partial(torch.optim.AdamW, fused=True), OPTIMIZER | {"betas": (0.9, 0.95), "eps": 1e-8}
    kinds = {"torch fused": theirs, OURS: FusedAdamW}
    builders = {name: partial(update, partial(kind, **settings), shapes) for name, kind in kinds.items()}
    reference = update(partial(AdamW, **settings), shapes[:1], torch.float64).results
    moved = BYTES_PER_PARAMETER * sum(map(torch.Size.numel, map(torch.Size, shapes)))
    ideal = moved / conditions.peak_rates["copy_bytes_per_second"]
    return timed_rows(case, conditions, builders, moved / 1e9, "GB/s", ideal, "measured copy", reference=reference)
