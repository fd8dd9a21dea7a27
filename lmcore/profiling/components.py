"""Each component of a model timed alone, with its FLOPs and bytes, against measured peak rates (the roofline).

FLOPs of matmuls are those of `lmcore.accounting`. Elementwise work is counted by `ELEMENTWISE_FLOPS`, one for
each addition, product, comparison, division, exponential or root. Bytes are the least that must move: every input and
weight read once, every output written once, in the types that they have; with a backward pass also every input, weight
and output gradient read, and every input and weight gradient written. Intermediate results of the eager operations
are not in them: that they are moved all the same is what a component loses against its roof.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from lmcore import accounting
from lmcore.device import autocast, device_name, select_device, set_matmul_precision
from lmcore.errors import require
from lmcore.functional import at_least_float32, cross_entropy, silu, softmax
from lmcore.model import Linear, RMSNorm, RotaryPositionalEmbedding, TransformerBlock, causal_mask
from lmcore.optimizer import AdamW
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.peak_rates import peak_rates
from lmcore.profiling.timing import Timer

ELEMENTWISE_FLOPS = {
    "RMSNorm": 4,  # of an element: square, sum, division by the root, gain
    "RoPE": 3,  # of an element of queries or keys: four products and two sums for each pair of them
    "scale, mask, softmax": 7,  # of a score: scale, mask, maximum, difference, exponential, sum, division
    "SiLU and gate": 6,  # of a hidden value: sign, exponential, sum, division, product; product with the gate
    "residual addition": 1,
    "cross-entropy": 4,  # of a logit: maximum, difference, exponential, sum
}
"""Operations for each element of the component's first input, of RoPE's first two."""

Part = tuple[dict[str, Any], Callable[..., Any], tuple[Tensor, ...]]
"""A part of the model that can be run alone: what the table says of it, a function or module, and its inputs."""


def timed(part: Part, timer: Timer, precision: str) -> Iterator[dict[str, Any]]:
    """A row with `bytes` and seconds of the forward pass and, of a whole, one of forward and backward pass together."""
    row, run, inputs = part
    weights = [*run.parameters()] if isinstance(run, nn.Module) else []

    def forward() -> Any:
        with torch.no_grad(), autocast(timer.device, precision):
            return run(*inputs)

    output = forward()
    read = sum(tensor.nbytes for tensor in (*inputs, *weights))
    written = sum(tensor.nbytes for tensor in ((output,) if isinstance(output, Tensor) else output))
    yield row | {"bytes": read + written, "seconds": timer(forward)}
    if row["kind"] == "whole":
        gradient, leaves = torch.randn_like(output), [x.detach().requires_grad_() for x in inputs]

        def both() -> Any:
            with autocast(timer.device, precision):
                result = run(*leaves)
            return torch.autograd.grad(result, [*leaves, *weights], gradient)

        row = row | {"direction": "forward + backward", "flops": 3 * row["flops"], "bytes": 3 * read + 2 * written}
        yield row | {"seconds": timer(both)}


def beside(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """The output of each of several linear layers of one input."""
    return [x @ weight.T for weight in weights]


def components(config: WorkloadConfig, device: torch.device) -> Iterator[Part]:
    """The components of one block and of the model around it, in turn, with inputs of the types that they have there.

    Attention is split as the reference implementation computes it; the feed-forward network is not where it has no
    gate. Inputs are random, and gone once the next component is asked for. `kind` is matmul, elementwise or whole
    (also timed with its backward pass), `count` how often a step of the whole model runs it.
    """
    c, batch, time = config.model, config.batch_size, config.model.context_length
    totals = accounting.forward_flops_by_component(c, batch)
    flops = {name: total if name == "lm_head" else total // c.num_layers for name, total in totals.items()}
    linear, rope, positions = partial(Linear, device=device), None, torch.arange(time, device=device)
    with autocast(device, config.precision):
        dtype = (torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)).dtype  # of activations

    def tokens(width: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(batch, time, width, device=device).to(dtype)

    def heads(width: int = c.d_k, number: int = c.num_heads) -> Tensor:
        return torch.randn(batch, number, time, width, device=device).to(dtype)

    def distribution(scores: Tensor, mask: Tensor) -> Tensor:
        masked = (scores / math.sqrt(c.d_k)).masked_fill(~mask, float("-inf"))
        return softmax(at_least_float32(masked), dim=-1).to(dtype)

    def part(name: str, part_of: str, run: Callable[..., Any], inputs: tuple, flops: int = 0, **more: Any) -> Part:
        elements = sum(x.numel() for x in inputs[: 2 if name == "RoPE" else 1])
        kind, flops = ("matmul", flops) if flops else ("elementwise", ELEMENTWISE_FLOPS[name] * elements)
        row = {"component": name, "part_of": part_of, "kind": kind, "count": c.num_layers, "direction": "forward"}
        return row | {"flops": flops} | more, run, inputs

    def rotated(q: Tensor, k: Tensor, *_: Tensor) -> list[Tensor]:
        return [rope(q, positions), rope(k, positions)]

    x = (tokens(c.d_model, torch.float32),)  # the residual stream
    if c.norm != "none":
        norms = accounting.parameter_counts(c)["norms"] // c.d_model
        yield part("RMSNorm", "block", RMSNorm(c.d_model, device=device), x, count=norms)
    yield part("residual addition", "block", torch.add, (*x, tokens(c.d_model)), count=2 * c.num_layers)
    weights = [linear(c.d_model, number * c.d_k).weight for number in (c.num_heads, c.kv_heads, c.kv_heads)]
    yield part("Q, K, V projections", "attention", beside, (*x, *weights), flops=flops["qkv_proj"])
    if c.position == "rope":
        rope = RotaryPositionalEmbedding(c.rope_theta, c.d_k, time, device=device)
        yield part("RoPE", "attention", rotated, (heads(), heads(number=c.kv_heads), rope.cos, rope.sin))
    yield part("scores", "attention", lambda q, k: q @ k.transpose(-2, -1), (heads(), heads()), flops=flops["scores"])
    yield part("scale, mask, softmax", "attention", distribution, (heads(time), causal_mask(time, time, device=device)))
    yield part("weighted sum", "attention", torch.matmul, (heads(time), heads()), flops=flops["weighted_sum"])
    output = linear(c.d_model, c.d_model)
    yield part("output projection", "attention", output, (tokens(c.d_model),), flops=flops["output_proj"])
    if c.ffn == "swiglu":
        matrix, up = flops["ffn"] // 3, [linear(c.d_model, c.d_ff).weight for _ in range(2)]
        yield part("W1 and W3", "ffn", beside, (*x, *up), flops=2 * matrix)
        yield part("SiLU and gate", "ffn", lambda a, b: silu(a) * b, (tokens(c.d_ff), tokens(c.d_ff)))
        yield part("W2", "ffn", linear(c.d_ff, c.d_model), (tokens(c.d_ff),), flops=matrix)
    block = TransformerBlock(c, rope, device=device)
    whole = sum(flops[name] for name in ("qkv_proj", "scores", "weighted_sum", "output_proj"))
    yield part("attention", "attention", block.attn, x, flops=whole, kind="whole")
    yield part("feed-forward network", "ffn", block.ffn, x, flops=flops["ffn"], kind="whole")
    yield part("LM head", "model", linear(c.d_model, c.vocab_size), x, flops=flops["lm_head"], count=1)
    targets = torch.randint(c.vocab_size, (batch, time), device=device)
    yield part("cross-entropy", "model", cross_entropy, (tokens(c.vocab_size), targets), count=1)
    update, read = adamw(block)
    flops_of_update = sum(accounting.ADAMW_FLOPS.values()) * sum(p.numel() for p in block.parameters())
    yield part("AdamW", "block", update, read, flops_of_update, kind="elementwise", direction="update")


def adamw(block: nn.Module) -> tuple[Callable[..., list[Tensor]], tuple[Tensor, ...]]:
    """AdamW on the parameters of one block, which returns what it writes, and what it reads: gradients, too.

    A step runs it for every block, and for embeddings besides.
    """
    parameters = list(block.parameters())
    optimizer = AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    written = parameters + [moment for p in parameters for moment in (optimizer.state[p]["m"], optimizer.state[p]["v"])]

    def update(*_: Tensor) -> list[Tensor]:
        optimizer.step()
        return written

    return update, (*written, *(p.grad for p in parameters))


def measure_components(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """Times every component of `config.model` alone: a task of `lmcore.profiling.runner.run_cases`.

    The result holds the `device`, the measured peak rates as `peak_rates`, and `components`, a row for each component
    and direction with its FLOPs, bytes and the `seconds` that it keeps the device busy.
    """
    device, _ = select_device(config.device)
    torch.manual_seed(config.seed)
    rates = peak_rates(device, config.precision)
    set_matmul_precision(device, config.precision)
    timer = Timer(device)
    rows = [row for part in components(config, device) for row in timed(part, timer, config.precision)]
    return {"device": device_name(device), "peak_rates": rates, "components": rows}


def components_table(records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each component and direction of each complete record of `run_cases(measure_components, …)`.

    Beside what was measured: `intensity` in FLOPs per byte, achieved `flops_per_second`, `attainable` ones by the
    roofline, the `roofline_share` of them, and what the roof is made of (`bound`: compute or memory). By Williams,
    Waterman and Patterson 2009: no more than the peak, and no more than the memory can feed.
    """
    rows = []
    for record in records.values():
        config, result = record["config"], record["result"] or {"components": (), "peak_rates": {}}
        head = {name: config[name] for name in ("size", "batch_size", "precision")} | {"case": record["case"]}
        head |= {"context_length": config["model"]["context_length"], "device": result.get("device")}
        rows += [head | row | result["peak_rates"] for row in result["components"]]
    require(len(rows) > 0, "No component could be timed; choose a smaller size or context.")
    table = pd.DataFrame(rows)
    table["intensity"] = table["flops"] / table["bytes"]
    table["flops_per_second"] = table["flops"] / table["seconds"]
    table["bytes_per_second"] = table["bytes"] / table["seconds"]
    fed = table["intensity"] * table["peak_bytes_per_second"]
    table["attainable"] = fed.clip(upper=table["peak_flops_per_second"])
    table["roofline_share"] = table["flops_per_second"] / table["attainable"]
    table["bound"] = (fed < table["peak_flops_per_second"]).map({True: "memory", False: "compute"})
    return table
