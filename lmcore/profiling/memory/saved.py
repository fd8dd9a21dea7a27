"""What one Transformer block keeps for the backward pass, operation by operation (CS336 A2 section 1.1.6 (e))."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcore.device import autocast, select_device, set_matmul_precision
from lmcore.model import RotaryPositionalEmbedding, TransformerBlock
from lmcore.profiling.memory.profile import copied_parameter
from lmcore.profiling.memory.snapshot import calling_line
from lmcore.profiling.workload import WorkloadConfig

RESULTS = ("result", "output", "logsumexp", "log_sumexp")
"""How the names of what an operation saves end, if it is something that it computed itself."""


@dataclass
class Saved:
    """One storage that the backward pass needs, and the operations that keep it."""

    storage: Any
    """Held, so that its identity stays its own."""
    shape: list[int]
    dtype: torch.dtype
    source: str
    copy: bool
    """It is a parameter in another precision."""
    gradient: bool
    """A gradient flows through it."""
    operations: list[str] = field(default_factory=list)


def saved_by_operation(config: WorkloadConfig, abstract: bool = False) -> list[dict[str, Any]]:
    """The storages that one block of `config.model` keeps for its backward pass, in order of saving. Bytes.

    Measured by running the block forward on the device of the configuration, in its precision, and looking at every
    tensor that autograd saves (`torch.autograd.graph.saved_tensors_hooks`). A storage is counted once, whatever number
    of views of it is saved; parameters are left out. `abstract` predicts it on fake tensors, which have shapes and
    types but no memory: any size, without a GPU (with the autocast rules and the attention kernels of the CPU).

    What an operation saved whose result is detached, as the maximum in softmax, is gone with it and not counted.

    Rows: {"operation": the autograd node that saved it first ("BmmBackward0"), "operations": all that did,
    "source": "lmcore/functional.py:21 softmax", "kind": "activation" | "input" (the block's own input, which is also
    the output of the block before) | "weight copy" (a parameter in half precision, by autocast) | "constant" (what no
    gradient flows through, such as the mask and RoPE's angles), "shape", "dtype", "bytes"}.
    """
    device = torch.device("cpu") if abstract else select_device(config.device)[0]
    set_matmul_precision(device, config.precision)
    block, x = block_and_input(config, torch.device("meta") if abstract else device)
    with FakeTensorMode(allow_non_fake_inputs=True) if abstract else contextlib.nullcontext():
        if abstract:  # drawing weights looks at their values, which fake ones do not have
            block, x = block.to_empty(device=device), torch.empty_like(x, device=device).requires_grad_()
        saved: dict[int, Saved] = {}
        with watching(saved), autocast(device, config.precision):
            y = block(x)
        name_operations(y, saved)
        excluded = {p.untyped_storage()._cdata for p in block.parameters()}
        own_input = x.untyped_storage()._cdata
        return [row(s, key == own_input) for key, s in saved.items() if s.operations and key not in excluded]


def block_and_input(config: WorkloadConfig, device: torch.device) -> tuple[TransformerBlock, Tensor]:
    """A block and a residual stream (batch, context, d_model) that needs a gradient, as between blocks."""
    c = config.model
    rope = RotaryPositionalEmbedding(c.rope_theta, c.d_k, c.context_length, device) if c.position == "rope" else None
    torch.manual_seed(config.seed)
    x = torch.randn(config.batch_size, c.context_length, c.d_model, device=device)
    return TransformerBlock(c, rope, device=device), x.requires_grad_()


@contextlib.contextmanager
def watching(saved: dict[int, Saved]) -> Iterator[None]:
    """Notes in `saved`, by identity of the storage, all tensors that operations inside save for the backward pass."""

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in saved:
            copied = copied_parameter(tensor)
            copy = copied is not None and copied.dtype != tensor.dtype
            line = calling_line(sys._getframe(1))
            saved[storage._cdata] = Saved(storage, [*tensor.shape], tensor.dtype, line, copy, tensor.requires_grad)
        return tensor.detach()  # an operation that saved its own result with its node would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def name_operations(y: Tensor, saved: dict[int, Saved]) -> None:
    """Tells every storage which nodes of `y`'s autograd graph keep it, in order of the forward pass."""
    nodes, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for attribute in dir(node):
            ours = attribute == "saved_tensors"  # an operation in Python, which keeps nothing else but these
            if not (ours or attribute.startswith("_saved_")):
                continue
            value = getattr(node, attribute)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                found = saved.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
                if found is not None:
                    found.operations.append(node.name())
                    found.gradient |= ours or attribute.endswith(RESULTS)  # not known yet when it was saved


def row(saved: Saved, is_input: bool) -> dict[str, Any]:
    """One storage as a row of the table."""
    kind = "activation" if saved.gradient else "constant"
    operations = list(dict.fromkeys(saved.operations))
    return {
        "operation": operations[0],
        "operations": operations,
        "source": saved.source,
        "kind": "weight copy" if saved.copy else "input" if is_input else kind,
        "shape": saved.shape,
        "dtype": str(saved.dtype).removeprefix("torch."),
        "bytes": saved.storage.nbytes(),
    }
