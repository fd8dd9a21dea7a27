"""Reference implementation of `lmcore.fast.kernels.embedding` in plain PyTorch."""

from torch import Tensor

from lmcore.functional import at_least_float32


def embedding_backward_(
    dx: Tensor, sorted_ids: Tensor, order: Tensor, gradient: Tensor, accumulate: bool = False
) -> Tensor:
    """See `lmcore.fast.kernels.embedding.embedding_backward_`."""
    wide, sorted_ids = at_least_float32(dx), sorted_ids.long()
    sums = wide.new_zeros(gradient.shape).index_add_(0, sorted_ids, wide[order])
    if accumulate:
        return gradient.add_(sums)
    occurring = sorted_ids.unique_consecutive()
    gradient[occurring] = sums[occurring].to(gradient.dtype)
    return gradient
