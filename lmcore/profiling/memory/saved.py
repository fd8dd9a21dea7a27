"""Saved activations of one Transformer block: what it saves for the backward pass, operation by operation."""

import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.device import autocast, select_device, set_matmul_precision
from lmcore.model import RotaryPositionalEmbedding, TransformerBlock
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.memory.recording import storage_address
from lmcore.profiling.memory.snapshot import running_line


def saved_by_block(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`saved_by_operation` as a task for `lmcore.profiling.runner.run_cases`."""
    return {"saved": saved_by_operation(config)}


class Saved:
    """What autograd keeps in place of a tensor: it lives as long as the graph needs the tensor."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.source = tensor.detach(), running_line(sys._getframe(2))


def saved_by_operation(config: WorkloadConfig) -> list[dict[str, Any]]:
    """The storages that one block of `config.model` saves for its backward pass, in order of the forward pass. Bytes.

    Measured by running the block forward on the device of the configuration, in its precision, with hooks on what
    autograd saves. A storage is counted once, whatever number of views of it is saved; parameters are left out, but not
    their casts by autocast, and what is gone after the pass, as the maximum in softmax.

    Rows: "name", the operation of the block ("norm 1", "softmax", "w2"); "source" ("lmcore/functional.py:21 softmax");
    "bytes".
    """
    device, _ = select_device(config.device)
    set_matmul_precision(device, config.precision)
    block, x = block_and_input(config, device)
    seen: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        seen.append(weakref.ref(saved))
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor)
    with hooks, autocast(device, config.precision):
        y = block(x)  # noqa: F841  holds the graph
    counted, rows = {storage_address(p) for p in block.parameters()}, []
    for saved in filter(None, (reference() for reference in seen)):
        address = storage_address(saved.tensor)
        if address not in counted and saved.tensor.dim():  # a number is Python's own
            counted.add(address)
            mask = saved.tensor.dtype == torch.bool
            rows.append({"source": saved.source, "mask": mask, "bytes": saved.tensor.untyped_storage().nbytes()})
    names = names_of_operations(rows)
    return [
        {"name": name, "source": row["source"], "bytes": row["bytes"]} for name, row in zip(names, rows, strict=True)
    ]


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
            names.append("mask" if row["mask"] else matmul)
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
