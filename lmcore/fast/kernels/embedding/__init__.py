"""Gradient of the token embedding: sums of rows by token, in a fixed order (section 3.4.3)."""

from types import ModuleType

import torch
from torch import Tensor

from lmcore.fast.kernels.common.support import on_device_of, runs_triton
from lmcore.fast.kernels.embedding import reference


def sorted_tokens(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The token ids (N,) in order, and where each was: what `embedding_backward_` needs. Equal ones stay in order.

    Sorted in the narrowest type that holds the vocabulary: a radix sort goes through the data once per byte.
    """
    narrow = next(t for t in (torch.int16, torch.int32, torch.int64) if vocab_size <= torch.iinfo(t).max)
    return ids.to(narrow).sort(stable=True)


def embedding_backward_(
    dx: Tensor, sorted_ids: Tensor, order: Tensor, gradient: Tensor, accumulate: bool = False
) -> Tensor:
    """Writes the sums of the rows of `dx` (N, D) with the same token into the rows of `gradient` (V, D); returns it.

    `sorted_ids` and `order` are those of `sorted_tokens`: with equal tokens side by side, each sum has one author and
    one order, so that it repeats itself bit by bit, which atomic additions do not. Rows of tokens that do not occur are
    left alone; `accumulate` adds to the others instead of replacing them (tied embeddings). Sums are in at least
    float32.
    """
    with on_device_of(dx):
        return kernels(dx).embedding_backward_(dx, sorted_ids, order, gradient, accumulate)


def kernels(x: Tensor) -> ModuleType:
    """The module whose functions serve tensors like this one."""
    if not runs_triton(x.device):
        return reference
    from lmcore.fast.kernels.embedding import gpu

    return gpu
