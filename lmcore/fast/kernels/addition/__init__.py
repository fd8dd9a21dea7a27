"""Addition on a part of the GPU, beside a message or another kernel."""

from torch import Tensor

from lmcore.fast.kernels.common.support import on_device_of, runs_triton


def add_(total: Tensor, more: Tensor) -> Tensor:
    """Adds `more` to `total`, of the same shape and type, both contiguous; returns `total`.

    On a GPU, programs on about half of an H100's multiprocessors do it, nearly as fast as all would. NCCL's kernels
    find room on the others, which PyTorch's own addition fills.
    """
    if not runs_triton(total.device) or total.is_complex():
        return total.add_(more)
    from lmcore.fast.kernels.addition import gpu

    with on_device_of(total):
        return gpu.add_(total, more)
