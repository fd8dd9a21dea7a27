"""Each component of a model timed alone, with its FLOPs and bytes, against measured ceilings (the roofline).

FLOPs of matrix products are those of `lmcore.accounting`. Elementwise work is counted by `ELEMENTWISE_FLOPS`, one for
each addition, product, comparison, division, exponential or root. Bytes are the least that must move: every input and
weight read once, every output written once, in the types that they have; with a backward pass also every input, weight
and output gradient read, and every input and weight gradient written. Intermediate results of the eager operations
are not in them: that they are moved all the same is what a component loses against its roof.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from lmcore import accounting
from lmcore.device import autocast, device_name, select_device, set_matmul_precision
from lmcore.functional import at_least_float32, cross_entropy, silu, softmax
from lmcore.model import Linear, RMSNorm, RotaryPositionalEmbedding, SwiGLU, TransformerBlock, causal_mask
from lmcore.optimizer import AdamW
from lmcore.profiling.ceilings import Timer, ceilings
from lmcore.profiling.workload import WorkloadConfig

ELEMENTWISE_FLOPS = {
    "RMSNorm": 4,  # of an element: square, sum, division by the root, gain
    "RoPE": 6,  # of an element of queries and one of keys: four products and two sums for each pair of them
    "scale, mask, softmax": 7,  # of a score: scale, mask, maximum, difference, exponential, sum, division
    "SiLU and gate": 6,  # of a hidden value: sign, exponential, sum, division, product; product with the gate
    "residual sum": 1,
    "cross-entropy": 4,  # of a logit: maximum, difference, exponential, sum
}
"""Operations for each element of the component's first input."""


@dataclass(frozen=True)
class Component:
    """A part of the model that can be run alone: what it computes, from what, and what that costs."""

    name: str
    part_of: Literal["attention", "ffn", "block", "model"]
    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    flops: int | None = None
    """None: elementwise work, by `ELEMENTWISE_FLOPS`."""
    count: int | None = None
    """How often a step of the whole model runs it; None: once in each block."""
    kind: Literal["matmul", "elementwise", "whole"] = "matmul"
    """Of what has `flops`; a whole is also timed with its backward pass."""
    direction: str = "forward"

    def rows(self, timer: Timer, config: WorkloadConfig) -> Iterator[dict[str, Any]]:
        """What was measured of the forward pass and, of a whole, of forward and backward pass together."""
        count = config.model.num_layers if self.count is None else self.count
        kind = "elementwise" if self.flops is None else self.kind
        flops = ELEMENTWISE_FLOPS[self.name] * self.inputs[0].numel() if self.flops is None else self.flops

        def row(direction: str, factor: int, moved: int, function: Callable[[], Any]) -> dict[str, Any]:
            seconds, issue_seconds = timer(function)
            return {
                "component": self.name, "part_of": self.part_of, "kind": kind, "count": count, "direction": direction,
                "flops": factor * flops, "bytes": moved, "seconds": seconds, "issue_seconds": issue_seconds,
            }  # fmt: skip

        def forward() -> Any:
            with torch.no_grad(), autocast(timer.device, config.precision):
                return self.run(*self.inputs)

        output = forward()
        read = sum(tensor.nbytes for tensor in (*self.inputs, *self.weights))
        written = sum(tensor.nbytes for tensor in ((output,) if isinstance(output, Tensor) else output))
        yield row(self.direction, 1, read + written, forward)
        if kind == "whole":
            gradient = torch.randn_like(output)
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in self.inputs]
            wanted = [x for x in leaves if x.requires_grad] + list(self.weights)

            def both() -> Any:
                with autocast(timer.device, config.precision):
                    result = self.run(*leaves)
                return torch.autograd.grad(result, wanted, gradient)

            yield row("forward + backward", 3, 3 * read + 2 * written, both)


def measure_components(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times every component of `config.model` alone: a task of `lmcore.profiling.runner.run_cases`.

    The result holds the `device`, the measured `ceilings` and `components`, a row for each component and direction with
    its FLOPs, bytes, `seconds` that it keeps the device busy and `issue_seconds` that the host needs to hand it over.
    """
    device, _ = select_device(config.device)
    torch.manual_seed(config.seed)
    roofs = ceilings(device, config.precision)
    set_matmul_precision(device, config.precision)
    timer, model = Timer(device), Parts(config, device)
    rows: list[dict[str, Any]] = []
    for parts in (model.block, model.attention, model.ffn, model.wholes, model.head, model.optimizer):
        for component in parts():  # the tensors of one at a time
            rows += component.rows(timer, config)
    return {"device": device_name(device), "ceilings": roofs, "components": rows}


class Parts:
    """The components of one block and of the model around it, with inputs of the types that they have in the model."""

    def __init__(self, config: WorkloadConfig, device: torch.device):
        self.config, self.model, self.device = config, config.model, device
        with autocast(device, config.precision):
            self.dtype = (torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)).dtype  # of activations
        flops = accounting.forward_flops_by_component(self.model, config.batch_size)
        self.flops = {name: n if name == "lm_head" else n // self.model.num_layers for name, n in flops.items()}

    def tokens(self, width: int) -> Tensor:
        """Random (batch, context, width) in float32."""
        return torch.randn(self.config.batch_size, self.model.context_length, width, device=self.device)

    def rope(self) -> RotaryPositionalEmbedding:
        """The model's rotation."""
        c = self.model
        return RotaryPositionalEmbedding(c.rope_theta, c.d_k, c.context_length, device=self.device)

    def block(self) -> Iterator[Component]:
        """What a block does between attention and feed-forward network."""
        c, x = self.model, self.tokens(self.model.d_model)
        if c.norm != "none":
            norm, count = RMSNorm(c.d_model, device=self.device), accounting.parameter_counts(c)["norms"] // c.d_model
            yield Component("RMSNorm", "block", norm, (x,), (norm.weight,), count=count)
        yield Component("residual sum", "block", torch.add, (x, x.to(self.dtype)), count=2 * c.num_layers)

    def attention(self) -> Iterator[Component]:
        """The parts of the attention of one block, as the reference implementation computes them."""
        c, device, flops, part = self.model, self.device, self.flops, partial(Component, part_of="attention")
        x = self.tokens(c.d_model)
        projections = [Linear(c.d_model, c.d_model, device=device) for _ in range(3)]
        weights, output = tuple(projection.weight for projection in projections), projections[0]
        yield part(
            "Q, K, V projections", run=lambda x: [w(x) for w in projections], inputs=(x,), weights=weights,
            flops=flops["qkv_proj"],
        )  # fmt: skip
        shape = (self.config.batch_size, c.num_heads, c.context_length)
        q, k, v = torch.randn(3, *shape, c.d_k, device=device).to(self.dtype)
        if c.position == "rope":
            rope, at = self.rope(), torch.arange(c.context_length, device=device)
            angles = (rope.cos, rope.sin)
            yield part("RoPE", run=lambda q, k: [rope(q, at), rope(k, at)], inputs=(q, k), weights=angles)
        yield part("scores", run=lambda q, k: q @ k.transpose(-2, -1), inputs=(q, k), flops=flops["scores"])
        scores = torch.randn(*shape, c.context_length, device=device).to(self.dtype)
        mask = causal_mask(c.context_length, c.context_length, device=device)

        def distribution(scores: Tensor, mask: Tensor) -> Tensor:
            masked = (scores / math.sqrt(c.d_k)).masked_fill(~mask, float("-inf"))
            return softmax(at_least_float32(masked), dim=-1).to(self.dtype)

        yield part("scale, mask, softmax", run=distribution, inputs=(scores, mask))
        yield part("weighted sum", run=torch.matmul, inputs=(scores, v), flops=flops["weighted_sum"])
        heads = (x.to(self.dtype),)
        yield part("output projection", run=output, inputs=heads, weights=weights[:1], flops=flops["output_proj"])

    def ffn(self) -> Iterator[Component]:
        """The parts of the feed-forward network of one block; none of its ablation without a gate."""
        c, matrix = self.model, self.flops["ffn"] // 3
        if c.ffn != "swiglu":
            return
        network, x = SwiGLU(c.d_model, c.d_ff, device=self.device), self.tokens(c.d_model)
        up, down = (network.w1, network.w3), network.w2
        weights = tuple(w.weight for w in up)
        yield Component("W1 and W3", "ffn", lambda x: [w(x) for w in up], (x,), weights, 2 * matrix)
        a, b = (self.tokens(c.d_ff).to(self.dtype) for _ in range(2))
        yield Component("SiLU and gate", "ffn", lambda a, b: silu(a) * b, (a, b))
        yield Component("W2", "ffn", down, (a,), (down.weight,), matrix)

    def wholes(self) -> Iterator[Component]:
        """Attention and feed-forward network of one block as a whole, to be timed in both directions."""
        c, x = self.model, self.tokens(self.model.d_model)
        block = TransformerBlock(c, self.rope() if c.position == "rope" else None, device=self.device)
        flops = sum(self.flops[name] for name in ("qkv_proj", "scores", "weighted_sum", "output_proj"))
        for name, part_of, module, cost in (
            ("attention", "attention", block.attn, flops),
            ("feed-forward network", "ffn", block.ffn, self.flops["ffn"]),
        ):
            yield Component(name, part_of, module, (x,), tuple(module.parameters()), cost, kind="whole")

    def head(self) -> Iterator[Component]:
        """The LM head and the loss."""
        c, x = self.model, self.tokens(self.model.d_model)
        head = Linear(c.d_model, c.vocab_size, device=self.device)
        yield Component("output layer", "model", head, (x,), (head.weight,), self.flops["lm_head"], count=1)
        targets = torch.randint(c.vocab_size, x.shape[:2], device=self.device)
        logits = self.tokens(c.vocab_size).to(self.dtype)
        yield Component("cross-entropy", "model", cross_entropy, (logits, targets), count=1)

    def optimizer(self) -> Iterator[Component]:
        """AdamW on the parameters of one block; a step runs it for every block, and for embeddings besides.

        Read: parameters, gradients and both moments; written: all of them but the gradients.
        """
        parameters = list(TransformerBlock(self.model, device=self.device).parameters())
        optimizer = AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        moments = [moment for p in parameters for moment in (optimizer.state[p]["m"], optimizer.state[p]["v"])]

        def update(*_: Tensor) -> list[Tensor]:
            optimizer.step()
            return [*parameters, *moments]  # what was written

        flops = sum(accounting.ADAMW_FLOPS.values()) * sum(p.numel() for p in parameters)
        read = (*parameters, *(p.grad for p in parameters), *moments)
        yield Component("AdamW", "block", update, read, flops=flops, kind="elementwise", direction="update")


def components_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each component and direction of each complete record of `run_cases(measure_components, …)`.

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
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)])))


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
"""Of `components_table`, also where it has no row; what `Component.rows` measures besides follows."""
