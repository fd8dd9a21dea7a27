"""Bytes that operations move: counted as PyTorch runs them, on tensors that need not have memory behind them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that touch no bytes, besides those that PyTorch's schemas call views."""

OVERWRITING = {"copy_", "fill_", "zero_"}
"""Operations that do not read the tensor that they change."""


class BytesMoved(TorchDispatchMode):
    """Inside of the block, every operation that PyTorch runs eagerly is noted, those of the backward pass too.

    Each operation is taken to read its inputs and to write its outputs once, and nothing to stay in a cache in between:
    right for tensors larger than the cache. Views move nothing. Tensors on the device "meta" have shapes alone, so that
    the bytes moved at any size can be counted on any machine.
    """

    def __init__(self):
        super().__init__()
        self.operations: list[tuple[str, int, int]] = []
        """Of each operation the name, the bytes of the tensors that it reads, and of those that it writes."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.").partition(".")[0]
        alias = [output.alias_info for output in function._schema.returns]
        is_view = any(info is not None and not info.is_write for info in alias)
        if not is_view and name not in FREE:
            sources = (args[1:], kwargs) if name in OVERWRITING else (args, kwargs)
            read, written = bytes_in(sources), bytes_in(result)
            if read or written:
                self.operations.append((name, read, written))
        return result

    @property
    def total(self) -> int:
        """Bytes read and written by all operations."""
        return sum(read + written for _, read, written in self.operations)

    def lines(self, per: int, unit: str) -> Iterator[str]:
        """Calls and bytes divided by `per` of each kind of operation as text, and their sum; scalars are left out."""
        table = pd.DataFrame(self.operations, columns=["operation", "read", "written"])
        for name, rows in table.groupby("operation", sort=False):
            read, written = rows[["read", "written"]].sum() / per
            if read + written >= 0.01:
                yield f"{name:<18} {len(rows):2} ×  read {read:6.2f}  written {written:6.2f}  bytes per {unit}"
        yield f"together {self.total / per:.2f} bytes per {unit}"


def bytes_in(tree: Any) -> int:
    """Bytes of the tensors in nested arguments or results, each counted once; a broadcast one as it is stored."""
    tensors = {id(x): x for x in tree_leaves(tree) if isinstance(x, Tensor)}.values()
    sizes = ((x, (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)) for x in tensors)
    return sum(x.element_size() * math.prod(stored) for x, stored in sizes)


def moved_by(function: Callable[[], Any]) -> BytesMoved:
    """Runs the function and returns what it moved."""
    with BytesMoved() as moved:
        function()
    return moved
