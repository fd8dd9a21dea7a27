"""Gradient of the token embedding: sums of rows by token, in a fixed order (section 3.4.3)."""

import torch
from torch import Tensor

from lmcore.fast.kernels.dispatch import by_triton
from lmcore.functional import at_least_float32


def sorted_tokens(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The token ids (N,) in order, and where each was: what `embedding_backward_` needs. Equal ones stay in order.

    Sorted in the narrowest type that holds the vocabulary: a radix sort goes through the data once per byte.
    """
    narrow = next(t for t in (torch.int16, torch.int32, torch.int64) if vocab_size <= torch.iinfo(t).max)
    return ids.to(narrow).sort(stable=True)


@by_triton
def embedding_backward_(
    dx: Tensor, sorted_ids: Tensor, order: Tensor, gradient: Tensor, accumulate: bool = False
) -> Tensor:
    """Writes the sums of the rows of `dx` (N, D) with the same token into the rows of `gradient` (V, D); returns it.

    `sorted_ids` and `order` are those of `sorted_tokens`: with equal tokens side by side, each sum has one author and
    one order, so that it repeats itself bit by bit, which atomic additions do not. Rows of tokens that do not occur are
    left alone; `accumulate` adds to the others instead of replacing them (tied embeddings). Sums are in at least
    float32.
    """
    wide, sorted_ids = at_least_float32(dx), sorted_ids.long()
    sums = wide.new_zeros(gradient.shape).index_add_(0, sorted_ids, wide[order])
    if accumulate:
        return gradient.add_(sums)
    occurring = sorted_ids.unique_consecutive()
    gradient[occurring] = sums[occurring].to(gradient.dtype)
    return gradient
