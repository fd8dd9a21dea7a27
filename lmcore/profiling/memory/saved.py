"""Saved activations of one Transformer block: what it saves for the backward pass, operation by operation."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lmcore.device import autocast, select_device, set_matmul_precision
from lmcore.model import RotaryPositionalEmbedding, TransformerBlock
from lmcore.profiling.memory.snapshot import frame_in_lmcore
from lmcore.profiling.workload import WorkloadConfig

RESULTS = ("result", "output", "logsumexp", "log_sumexp")
"""How the names of what an operation saves end, if it is something that it computed itself."""


def saved_by_block(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`saved_by_operation` as a task for `lmcore.profiling.runner.run_cases`."""
    return {"saved": saved_by_operation(config)}


def saved_by_operation(config: WorkloadConfig, abstract: bool = False) -> list[dict[str, Any]]:
    """The storages that one block of `config.model` saves for its backward pass, in order of the forward pass. Bytes.

    Measured by running the block forward on the device of the configuration, in its precision, and looking at what the
    nodes of the autograd graph hold. A storage is counted once, whatever number of views of it is saved; parameters are
    left out. `abstract` predicts it on fake tensors, which have shapes and
    types but no memory: any size, without a GPU (with the autocast rules and the attention kernels of the CPU).

    What an operation saved whose result is detached, as the maximum in softmax, is gone with it and not counted.

    Rows: "name", the operation of the block ("norm 1", "softmax", "w2"); "operation", the autograd node that saved it
    first ("BmmBackward0"); "source" ("lmcore/functional.py:21 softmax"); "kind", "activation", "input" (the block's
    own, which is also the output of the block before), "weight copy" (a parameter in half precision, by autocast) or
    "constant" (what no gradient flows through, such as the mask and RoPE's angles); "shape", "dtype" and "bytes".
    """
    device = torch.device("cpu") if abstract else select_device(config.device)[0]
    set_matmul_precision(device, config.precision)
    block, x = block_and_input(config, torch.device("meta") if abstract else device)
    with FakeTensorMode(allow_non_fake_inputs=True) if abstract else contextlib.nullcontext():
        if abstract:  # drawing weights looks at their values, which fake ones do not have
            block, x = block.to_empty(device=device), torch.empty_like(x, device=device).requires_grad_()
        with torch.autograd.set_detect_anomaly(True), autocast(device, config.precision):  # notes stacks with nodes
            y = block(x)
        parameters, own_input = {p.untyped_storage()._cdata for p in block.parameters()}, x.untyped_storage()._cdata
        rows: dict[int, dict[str, Any]] = {}
        for node, tensor, computed in saved_tensors(y):
            if (key := tensor.untyped_storage()._cdata) in parameters:
                continue
            copied, kind = copied_parameter(tensor), "input" if key == own_input else "constant"
            row = rows.setdefault(
                key,
                {
                    "operation": node.name(),
                    "source": forward_line(node),
                    "kind": "weight copy" if copied is not None and copied.dtype != tensor.dtype else kind,
                    "shape": [*tensor.shape],
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "bytes": tensor.untyped_storage().nbytes(),
                },
            )
            if row["kind"] == "constant" and (computed or tensor.requires_grad):
                row["kind"] = "activation"
    return [{"name": name} | row for name, row in zip(names_of_operations(rows.values()), rows.values(), strict=True)]


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
            names.append("mask" if "MaskedFill" in row["operation"] else matmul)
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


def saved_tensors(y: Tensor) -> Iterator[tuple[Any, Tensor, bool]]:
    """The nodes of `y`'s autograd graph, in order of the forward pass, with each tensor that they save, and whether the
    operation computed it itself: then a gradient may flow through it, whatever the tensor says."""
    nodes, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for name in dir(node):
            ours = name == "saved_tensors"  # an operation in Python, which saves nothing else
            if ours or name.startswith("_saved_"):
                for tensor in tree_leaves(getattr(node, name)):
                    if isinstance(tensor, Tensor) and tensor.dim():  # a number is Python's own
                        yield node, tensor, ours or name.endswith(RESULTS)


def forward_line(node: Any) -> str:
    """The innermost line of lmcore of the stack that anomaly mode has noted with a node."""
    for text in reversed(node.metadata["traceback_"]):
        found = re.match(r'  File "(.*)", line (\d+), in (.*)', text)  # not so where recursion is abridged
        if found and (ours := frame_in_lmcore(found[1], int(found[2]), found[3])):
            return ours
    return "outside lmcore"
