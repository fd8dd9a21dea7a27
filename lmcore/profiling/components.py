"""Each component of a model timed alone, with its FLOPs and bytes, against measured ceilings (the roofline).

FLOPs of matrix products are those of `lmcore.accounting`. Elementwise work is counted by `ELEMENTWISE_FLOPS`, one for
each addition, product, comparison, division, exponential or root. Bytes are the least that must move: every input and
weight read once, every output written once, in the types that they have; with a backward pass also every input, weight
and output gradient read, and every input and weight gradient written. Intermediate results of the eager operations
are not in them: that they are moved all the same is what a component loses against its roof.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from lmcore import accounting
from lmcore.config import ModelConfig
from lmcore.device import autocast, device_name, select_device, set_matmul_precision
from lmcore.functional import at_least_float32, cross_entropy, silu, softmax
from lmcore.model import Linear, RMSNorm, RotaryPositionalEmbedding, SwiGLU, TransformerBlock, causal_mask
from lmcore.optimizer import AdamW
from lmcore.profiling.ceilings import Timer, ceilings
from lmcore.profiling.workload import WorkloadConfig

ELEMENTWISE_FLOPS = {
    "RMSNorm": 4,  # of an element: square, sum, division by the root, gain
    "RoPE": 3,  # of an element: four products and two sums for a pair
    "scale, mask, softmax": 7,  # of a score: scale, mask, maximum, difference, exponential, sum, division
    "SiLU and gate": 6,  # of a hidden value: sign, exponential, sum, division, product; product with the gate
    "residual sum": 1,
    "cross-entropy": 4,  # of a logit: maximum, difference, exponential, sum
}
"""Operations for each element of the component's (first) input."""


@dataclass(frozen=True)
class Component:
    """A part of the model that can be run alone: what it computes, from what, and what that costs."""

    name: str
    part_of: Literal["attention", "ffn", "block", "model"]
    kind: Literal["matmul", "elementwise", "whole"]
    count: int
    """How often a step of the whole model runs it."""
    flops: int
    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    direction: str = "forward"
    grad: bool = False
    """Whether it is also timed with its backward pass."""


def measure_components(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times every component of `config.model` alone: a task of `lmcore.profiling.cells.run_cells`.

    The result holds the `device`, the measured `ceilings` and `components`, a row for each component and direction with
    its FLOPs, bytes, `seconds` that it keeps the device busy and `issue_seconds` that the host needs to hand it over.
    """
    device, _ = select_device(config.device)
    torch.manual_seed(config.seed)
    roofs = ceilings(device, config.precision)
    set_matmul_precision(device, config.precision)
    timer = Timer(device)
    rows: list[dict[str, Any]] = []
    parts = (
        block_components,
        attention_components,
        ffn_components,
        block_wholes,
        head_components,
        optimizer_components,
    )
    for part in parts:  # the tensors of one at a time
        for component in part(config, device):
            rows += timed(component, config, timer)
    return {"device": device_name(device), "ceilings": roofs, "components": rows}


def timed(component: Component, config: WorkloadConfig, timer: Timer) -> list[dict[str, Any]]:
    """Rows of a component: its forward pass and, where that is asked for, forward and backward pass together."""
    c = component

    def forward() -> Any:
        with torch.no_grad(), autocast(timer.device, config.precision):
            return c.run(*c.inputs)

    output = forward()
    read, written = _bytes(c.inputs) + _bytes(c.weights), _bytes(output)
    head = {"component": c.name, "part_of": c.part_of, "kind": c.kind, "count": c.count}
    seconds, issue = timer(forward)
    rows = [head | _row(c.direction, c.flops, read + written, seconds, issue)]
    if c.grad:
        gradient = torch.randn_like(output)
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in c.inputs]
        wanted = [x for x in leaves if x.requires_grad] + list(c.weights)

        def both() -> Any:
            with autocast(timer.device, config.precision):
                result = c.run(*leaves)
            return torch.autograd.grad(result, wanted, gradient)

        seconds, issue = timer(both)
        rows.append(head | _row("forward + backward", 3 * c.flops, 3 * read + 2 * written, seconds, issue))
    return rows


def _row(direction: str, flops: int, moved: int, seconds: float, issue: float | None) -> dict[str, Any]:
    return {"direction": direction, "flops": flops, "bytes": moved, "seconds": seconds, "issue_seconds": issue}


def _bytes(tensors: Tensor | Sequence[Tensor]) -> int:
    tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def block_components(config: WorkloadConfig, device: torch.device) -> Iterator[Component]:
    """What a block does between attention and feed-forward network."""
    c = config.model
    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    if c.norm != "none":
        norm = RMSNorm(c.d_model, device=device)
        count = accounting.parameter_counts(c)["norms"] // c.d_model
        yield Component(
            "RMSNorm", "block", "elementwise", count, _elementwise("RMSNorm", x), norm, (x,), (norm.weight,)
        )
    update = x.to(_activation_dtype(config, device))
    cost = _elementwise("residual sum", x)
    yield Component("residual sum", "block", "elementwise", 2 * c.num_layers, cost, torch.add, (x, update))


def attention_components(config: WorkloadConfig, device: torch.device) -> Iterator[Component]:
    """The parts of the attention of one block, as the plain definition computes them."""
    c, flops, dtype = config.model, flops_of_one(config.model, config.batch_size), _activation_dtype(config, device)

    def part(name: str, kind: str, cost: int, run: Callable, inputs: tuple, weights: tuple = ()) -> Component:
        return Component(name, "attention", kind, c.num_layers, cost, run, inputs, weights)

    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    projections = [Linear(c.d_model, c.d_model, device=device) for _ in range(3)]
    weights = tuple(projection.weight for projection in projections)
    yield part("Q, K, V projections", "matmul", flops["qkv_proj"], lambda x: [w(x) for w in projections], (x,), weights)
    q, k, v = torch.randn(3, config.batch_size, c.num_heads, c.context_length, c.d_k, device=device).to(dtype)
    if c.position == "rope":
        rope, positions = _rope(c, device), torch.arange(c.context_length, device=device)
        cost, angles = 2 * _elementwise("RoPE", q), (rope.cos, rope.sin)
        yield part("RoPE", "elementwise", cost, lambda q, k: [rope(q, positions), rope(k, positions)], (q, k), angles)
    yield part("scores", "matmul", flops["scores"], lambda q, k: q @ k.transpose(-2, -1), (q, k))
    scores = torch.randn(*q.shape[:3], c.context_length, device=device).to(dtype)
    mask = causal_mask(c.context_length, c.context_length, device=device)

    def distribution(scores: Tensor, mask: Tensor) -> Tensor:
        masked = (scores / math.sqrt(c.d_k)).masked_fill(~mask, float("-inf"))
        return softmax(at_least_float32(masked), dim=-1).to(dtype)

    cost = _elementwise("scale, mask, softmax", scores)
    yield part("scale, mask, softmax", "elementwise", cost, distribution, (scores, mask))
    yield part("weighted sum", "matmul", flops["weighted_sum"], torch.matmul, (scores, v))
    heads, output = x.to(dtype), projections[0]
    yield part("output projection", "matmul", flops["output_proj"], output, (heads,), (output.weight,))


def ffn_components(config: WorkloadConfig, device: torch.device) -> Iterator[Component]:
    """The parts of the feed-forward network of one block; none of its ablation without a gate."""
    c = config.model
    if c.ffn != "swiglu":
        return
    network = SwiGLU(c.d_model, c.d_ff, device=device)
    matrix = flops_of_one(c, config.batch_size)["ffn"] // 3
    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    up, down = (network.w1, network.w3), network.w2

    def part(name: str, kind: str, cost: int, run: Callable, inputs: tuple, weights: tuple = ()) -> Component:
        return Component(name, "ffn", kind, c.num_layers, cost, run, inputs, weights)

    weights = tuple(w.weight for w in up)
    yield part("W1 and W3", "matmul", 2 * matrix, lambda x: [w(x) for w in up], (x,), weights)
    a, b = torch.randn(2, *x.shape[:2], c.d_ff, device=device).to(_activation_dtype(config, device))
    yield part("SiLU and gate", "elementwise", _elementwise("SiLU and gate", a), lambda a, b: silu(a) * b, (a, b))
    yield part("W2", "matmul", matrix, down, (a,), (down.weight,))


def block_wholes(config: WorkloadConfig, device: torch.device) -> Iterator[Component]:
    """Attention and feed-forward network of one block as a whole, to be timed in both directions."""
    c, flops = config.model, flops_of_one(config.model, config.batch_size)
    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    block = TransformerBlock(c, _rope(c, device) if c.position == "rope" else None, device=device)
    attention = sum(flops[name] for name in ("qkv_proj", "scores", "weighted_sum", "output_proj"))
    for name, part, module, cost in (
        ("attention", "attention", block.attn, attention),
        ("feed-forward network", "ffn", block.ffn, flops["ffn"]),
    ):
        weights = tuple(module.parameters())
        yield Component(name, part, "whole", c.num_layers, cost, module, (x,), weights, grad=True)


def head_components(config: WorkloadConfig, device: torch.device) -> Iterator[Component]:
    """The output layer and the loss."""
    c = config.model
    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    head = Linear(c.d_model, c.vocab_size, device=device)
    cost = flops_of_one(c, config.batch_size)["lm_head"]
    yield Component("output layer", "model", "matmul", 1, cost, head, (x,), (head.weight,))
    logits = torch.randn(*x.shape[:2], c.vocab_size, device=device).to(_activation_dtype(config, device))
    targets = torch.randint(c.vocab_size, x.shape[:2], device=device)
    cost = _elementwise("cross-entropy", logits)
    yield Component("cross-entropy", "model", "elementwise", 1, cost, cross_entropy, (logits, targets))


def optimizer_components(config: WorkloadConfig, device: torch.device) -> Iterator[Component]:
    """AdamW on the parameters of one block; a step runs it for every block, and for embeddings besides.

    Read: parameters, gradients and both moments; written: all of them but the gradients.
    """
    block = TransformerBlock(config.model, device=device)
    parameters = list(block.parameters())
    optimizer = AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    moments = [moment for p in parameters for moment in (optimizer.state[p]["m"], optimizer.state[p]["v"])]
    gradients = [p.grad for p in parameters]

    def update(*_: Tensor) -> list[Tensor]:
        optimizer.step()
        return [*parameters, *moments]  # what was written

    cost = sum(accounting.ADAMW_FLOPS.values()) * sum(p.numel() for p in parameters)
    read = (*parameters, *gradients, *moments)
    yield Component("AdamW", "block", "elementwise", config.model.num_layers, cost, update, read, direction="update")


def flops_of_one(model: ModelConfig, batch_size: int) -> dict[str, int]:
    """Matmul FLOPs of a forward pass by component, of a single block where every block has it."""
    flops = accounting.forward_flops_by_component(model, batch_size)
    return {name: value if name == "lm_head" else value // model.num_layers for name, value in flops.items()}


def _elementwise(name: str, x: Tensor) -> int:
    return ELEMENTWISE_FLOPS[name] * x.numel()


def _rope(model: ModelConfig, device: torch.device) -> RotaryPositionalEmbedding:
    return RotaryPositionalEmbedding(model.rope_theta, model.d_k, model.context_length, device=device)


def _activation_dtype(config: WorkloadConfig, device: torch.device) -> torch.dtype:
    """What a matrix product returns in the model, and its neighbors take in."""
    with autocast(device, config.precision):
        probe = torch.ones(1, 1, device=device)
        return (probe @ probe).dtype


def components_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each component and direction of each complete record of `run_cells(measure_components, …)`.

    Beside what was measured: `intensity` in FLOPs per byte, achieved `flops_per_second`, `attainable` ones by the
    roofline, the `roofline_share` of them, and what the roof is made of (`bound`: compute or memory).
    """
    rows = []
    for record in records.values():
        config, result = record["config"], record["result"] or {"components": (), "ceilings": {}}
        head = {
            "cell": record["cell"],
            "size": config["size"],
            "context_length": config["model"]["context_length"],
            "batch_size": config["batch_size"],
            "precision": config["precision"],
            "device": result.get("device"),
        }
        rows += [head | row | _roofline(row, result["ceilings"]) for row in result["components"]]
    return pd.DataFrame(rows, columns=COLUMNS)


def _roofline(row: Mapping[str, Any], roofs: Mapping[str, float]) -> dict[str, Any]:
    """Williams, Waterman and Patterson 2009: no more than the peak, and no more than the memory can feed."""
    intensity, achieved = row["flops"] / row["bytes"], row["flops"] / row["seconds"]
    fed = intensity * roofs["peak_bytes_per_second"]
    attainable = min(roofs["peak_flops_per_second"], fed)
    return dict(roofs) | {
        "intensity": intensity,
        "flops_per_second": achieved,
        "bytes_per_second": row["bytes"] / row["seconds"],
        "attainable": attainable,
        "roofline_share": achieved / attainable,
        "bound": "memory" if fed < roofs["peak_flops_per_second"] else "compute",
    }


COLUMNS = [
    "cell", "size", "context_length", "batch_size", "precision", "device", "component", "part_of", "kind", "count",
    "direction", "flops", "bytes", "seconds", "issue_seconds", "intensity", "flops_per_second", "bytes_per_second",
    "attainable", "roofline_share", "bound", "peak_flops_per_second", "peak_bytes_per_second",
]  # fmt: skip
"""Of `components_table`, also where it has no row."""
