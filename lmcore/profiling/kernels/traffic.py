"""Bytes that operations move: counted as PyTorch runs them, on tensors that need not have memory behind them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that touch no bytes, besides those that PyTorch's schemas call views."""

OVERWRITING = {"copy_", "fill_", "zero_"}
"""Operations that do not read the tensor that they change."""


@dataclass(frozen=True)
class Moved:
    """One operation: its name, the bytes of the tensors that it reads, and of those that it writes."""

    operation: str
    read: int
    written: int


class Traffic(TorchDispatchMode):
    """Inside of the block, every operation that PyTorch runs eagerly is noted, those of the backward pass too.

    Each operation is taken to read its inputs and to write its outputs once, and nothing to stay in a cache in between:
    right for tensors larger than the cache. Views move nothing. Tensors on the device "meta" have shapes alone, so that
    the traffic of any size can be counted on any machine.
    """

    def __init__(self):
        super().__init__()
        self.moved: list[Moved] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.").partition(".")[0]
        alias = [output.alias_info for output in function._schema.returns]
        is_view = any(info is not None and not info.is_write for info in alias)
        if not is_view and name not in FREE:
            sources = (args[1:], kwargs) if name in OVERWRITING else (args, kwargs)
            read, written = ({id(x): bytes_of(x) for x in tensors_in(tree)} for tree in (sources, result))
            if read or written:
                self.moved.append(Moved(name, sum(read.values()), sum(written.values())))
        return result

    @property
    def total(self) -> int:
        """Bytes read and written by all operations."""
        return sum(one.read + one.written for one in self.moved)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments or results."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; a broadcast one has as many as are stored."""
    stored = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(stored) * tensor.element_size()


def traffic_of(function: Callable[[], Any]) -> Traffic:
    """Runs the function and returns what it moved."""
    with Traffic() as traffic:
        function()
    return traffic


def traffic_table(traffic: Traffic) -> pd.DataFrame:
    """One row for each kind of operation, in the order of their first run: calls, bytes read and written."""
    rows = pd.DataFrame([vars(one) for one in traffic.moved], columns=["operation", "read", "written"])
    grouped = rows.groupby("operation", sort=False)
    return grouped[["read", "written"]].sum().assign(calls=grouped.size()).reset_index()


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """A tensor of shape and type alone."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def lines(table: pd.DataFrame, per: int, unit: str) -> Iterator[str]:
    """The rows of `traffic_table` as lines of text, bytes divided by `per`, and their sum; scalars are left out."""
    for row in table.to_dict("records"):
        read, written = row["read"] / per, row["written"] / per
        if read + written < 0.01:
            continue
        yield f"{row['operation']:<18} {row['calls']:2} ×  read {read:6.2f}  written {written:6.2f}  bytes per {unit}"
    total = (table["read"].sum() + table["written"].sum()) / per
    yield f"together {total:.2f} bytes per {unit}"
