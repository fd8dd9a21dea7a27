"""Saved activations of one Transformer block: what it saves for the backward pass, operation by operation."""

import contextlib
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcore.device import autocast, select_device, set_matmul_precision
from lmcore.model import RotaryPositionalEmbedding, TransformerBlock
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.memory.snapshot import running_line


def saved_by_block(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`saved_by_operation` as a task for `lmcore.profiling.runner.run_cases`."""
    return {"saved": saved_by_operation(config)}


class Saved:
    """What autograd keeps in place of a tensor: it lives as long as the graph needs the tensor."""

    def __init__(self, tensor: Tensor, source: str):
        self.tensor, self.source = tensor.detach(), source
        self.storage, self.parameter = storage(tensor), copied_parameter(tensor)


def saved_by_operation(config: WorkloadConfig, abstract: bool = False) -> list[dict[str, Any]]:
    """The storages that one block of `config.model` saves for its backward pass, in order of the forward pass. Bytes.

    Measured by running the block forward on the device of the configuration, in its precision, with hooks on what
    autograd saves. A storage is counted once, whatever number of views of it is saved; parameters are left out, and
    what is gone after the pass, as the maximum in softmax. `abstract` predicts it on fake tensors, which have shapes
    and types but no memory: any size, without a GPU (with the autocast rules and the attention kernels of the CPU).

    Rows: "name", the operation of the block ("norm 1", "softmax", "w2"); "source" ("lmcore/functional.py:21 softmax");
    "kind", "activation", "input" (the block's own, which is also the output of the block before) or "weight copy" (a
    parameter in half precision, by autocast); "shape", "dtype" and "bytes".
    """
    device = torch.device("cpu") if abstract else select_device(config.device)[0]
    set_matmul_precision(device, config.precision)
    block, x = block_and_input(config, torch.device("meta") if abstract else device)
    seen: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor, running_line(sys._getframe(1)))
        seen.append(weakref.ref(saved))
        return saved

    with FakeTensorMode(allow_non_fake_inputs=True) if abstract else contextlib.nullcontext():
        if abstract:  # drawing weights looks at their values, which fake ones do not have
            block, x = block.to_empty(device=device), torch.empty_like(x, device=device).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor)
        with hooks, autocast(device, config.precision):
            y = block(x)  # noqa: F841  holds the graph
        counted, rows = {storage(p) for p in block.parameters()}, []
        for saved in filter(None, (reference() for reference in seen)):
            if saved.storage in counted or not saved.tensor.dim():  # a number is Python's own
                continue
            counted.add(saved.storage)
            copied = saved.parameter is not None and saved.parameter.dtype != saved.tensor.dtype
            rows.append({
                "source": saved.source,
                "kind": "weight copy" if copied else "input" if saved.storage == storage(x) else "activation",
                "shape": [*saved.tensor.shape],
                "dtype": str(saved.tensor.dtype).removeprefix("torch."),
                "bytes": saved.tensor.untyped_storage().nbytes(),
            })  # fmt: skip
    return [{"name": name} | row for name, row in zip(names_of_operations(rows), rows, strict=True)]


def storage(tensor: Tensor) -> int:
    """What tells a tensor's storage from others."""
    return tensor.untyped_storage()._cdata


VIEWS_AND_COPIES = ("ToCopyBackward", "TBackward", "PermuteBackward", "TransposeBackward", "ViewBackward")


def copied_parameter(tensor: Tensor) -> Tensor | None:
    """The parameter of which `tensor` is a view or a cast, nothing else having been done to it; else None."""
    node = tensor.grad_fn
    while node is not None and any(view in node.name() for view in VIEWS_AND_COPIES):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


FUNCTIONS = {"RotaryPositionalEmbedding.forward": "rope", "SwiGLU.forward": "gate"}
"""Functions that are one operation of a block."""


def names_of_operations(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The operation of the block that saved each of its storages, which are in order of the forward pass."""
    names: list[str] = []
    for row in rows:
        function, attended = row["source"].split()[-1], bool({"weighted sum", "fused attention"} & {*names})
        if function == "Linear.forward":
            second = "w2" if "gate" in names else "w1, w3" if "norm 2" in names else "output projection"
            names.append(second if attended else "q, k, v projections")
        elif function == "scaled_dot_product_attention":
            matmul = "weighted sum" if "softmax" in names else "scores"
            names.append("mask" if row["dtype"] == "bool" else matmul)
        elif function == "RMSNorm.forward":
            names.append("norm 2" if attended else "norm 1")
        else:
            names.append(FUNCTIONS.get(function, "fused attention" if "attention" in function else function))
    return names


def block_and_input(config: WorkloadConfig, device: torch.device) -> tuple[TransformerBlock, Tensor]:
    """A block and a residual stream (batch, context, d_model) that needs a gradient, as between blocks."""
    c = config.model
    rope = RotaryPositionalEmbedding(c.rope_theta, c.d_k, c.context_length, device) if c.position == "rope" else None
    torch.manual_seed(config.seed)
    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    return TransformerBlock(c, rope, device=device), x.requires_grad_()
