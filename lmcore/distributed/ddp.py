"""Data parallelism (CS336 A2 section 5): each rank has the whole model and a part of the batch; gradients are averaged.

Each class changes one thing of the one before it:

- `NaiveDDP` averages gradient after gradient, when the backward pass is over;
- `FlatDDP` averages all of them in one call;
- `OverlappedDDP` sends each as soon as it is there, while the backward pass continues;
- `BucketedDDP` sends a bucket of them as soon as all of its gradients are there.

All four are used alike: forward, backward, `finish_gradient_synchronization`, optimizer step. Ranks must run the same
model on equally large parts of the batch; the loss is the mean over a rank's part. Of a parameter that no rank has
used there is no gradient, as on one process.
"""

from collections.abc import Sequence
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmcore.distributed.collectives import Group
from lmcore.errors import require


def broadcast_state(module: nn.Module, group: Group = None) -> None:
    """Gives every rank the parameters and buffers of rank 0."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}  # tied ones once
    for tensor in tensors.values():
        dist.broadcast(tensor.data, group=group, group_src=0)


class DataParallel(nn.Module):
    """What the four have in common: the same weights on all ranks, and averages of gradients.

    `gradient_dtype` (such as torch.bfloat16) is the type in which gradients travel and are summed; None is their own.
    """

    def __init__(self, module: nn.Module, gradient_dtype: torch.dtype | None = None, group: Group = None):
        super().__init__()
        self.module, self.gradient_dtype, self.group = module, gradient_dtype, group
        broadcast_state(module, group)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def trained(self) -> list[nn.Parameter]:
        """Parameters that get gradients, in the model's order, tied ones once."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def begin_sum(self, gradients: Sequence[Tensor]) -> tuple[dist.Work, Tensor, Sequence[Tensor]]:
        """Begins to sum gradients over the ranks as one tensor; `end_average` takes what it returns."""
        if len(gradients) == 1 and self.gradient_dtype in (None, gradients[0].dtype):
            flat = gradients[0]
        else:
            dtype = self.gradient_dtype or gradients[0].dtype
            flat = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
        return dist.all_reduce(flat, group=self.group, async_op=True), flat, gradients

    def end_average(self, work: dist.Work, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Waits for a sum, divides it by the number of ranks, and puts it into the gradients."""
        work.wait()
        flat /= dist.get_world_size(self.group)
        if flat is gradients[0]:
            return
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def finish_gradient_synchronization(self) -> None:
        """Between backward pass and optimizer step: gradients are averages over the ranks afterwards."""
        raise NotImplementedError


class NaiveDDP(DataParallel):
    """One all-reduce for each parameter, after the backward pass."""

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.trained():
            if parameter.grad is not None:
                self.end_average(*self.begin_sum([parameter.grad]))


class FlatDDP(DataParallel):
    """One all-reduce of all gradients together, after the backward pass; one for each type where there are several."""

    def finish_gradient_synchronization(self) -> None:
        gradients = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            self.end_average(*self.begin_sum([gradient for gradient in gradients if gradient.dtype == dtype]))


class OverlappedDDP(DataParallel):
    """An all-reduce for each parameter as soon as its gradient is there, while the backward pass continues."""

    def __init__(self, module: nn.Module, gradient_dtype: torch.dtype | None = None, group: Group = None):
        super().__init__(module, gradient_dtype, group)
        self.pending: list[tuple] = []
        method = WeakMethod(self.gradient_is_there)  # autograd holds the hook where Python finds no cycle to free

        def hook(parameter: Tensor) -> None:
            if (gradient_is_there := method()) is not None:
                gradient_is_there(parameter)

        for parameter in self.trained():
            parameter.register_post_accumulate_grad_hook(hook)

    def gradient_is_there(self, parameter: Tensor) -> None:
        """What autograd calls when it has added up a parameter's gradient."""
        self.pending.append(self.begin_sum([parameter.grad]))

    def finish_gradient_synchronization(self) -> None:
        for sum_ in self.pending:
            self.end_average(*sum_)
        self.pending.clear()


def filled_buckets(parameters: Sequence[nn.Parameter], bucket_size_mb: float) -> list[list[nn.Parameter]]:
    """The parameters from the last to the first in buckets of at most so many MB (2**20 bytes) and of one type."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        size += parameter.nbytes
        if not buckets or size > bucket_size_mb * 2**20 or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = parameter.nbytes
        buckets[-1].append(parameter)
    return buckets


class BucketedDDP(OverlappedDDP):
    """An all-reduce for each bucket of at most `bucket_size_mb` MB (2**20 bytes) as soon as its gradients are there.

    Buckets take the parameters from the last to the first, in which order their gradients come. Every rank sends them
    in the order of their numbers, also when a later one is full first. A larger parameter has a bucket of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float = 25,
        gradient_dtype: torch.dtype | None = None,
        group: Group = None,
    ):
        require(bucket_size_mb > 0, f"bucket_size_mb must be positive, not {bucket_size_mb}.")
        super().__init__(module, gradient_dtype, group)
        self.buckets = filled_buckets(self.trained(), bucket_size_mb)
        self.bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        self.begin_step()

    def begin_step(self) -> None:
        self.missing, self.next_bucket = [len(bucket) for bucket in self.buckets], 0

    def gradient_is_there(self, parameter: Tensor) -> None:
        self.missing[self.bucket_of[parameter]] -= 1
        while self.next_bucket < len(self.buckets) and self.missing[self.next_bucket] == 0:
            self.send_next()

    def send_next(self) -> None:
        """Begins the sum of the next bucket, of as many gradients as there are."""
        gradients = [parameter.grad for parameter in self.buckets[self.next_bucket] if parameter.grad is not None]
        if gradients:
            self.pending.append(self.begin_sum(gradients))
        self.next_bucket += 1

    def finish_gradient_synchronization(self) -> None:
        while self.next_bucket < len(self.buckets):  # those in which a parameter was not used
            self.send_next()
        super().finish_gradient_synchronization()
        self.begin_step()
