"""Collectives made of sends and receives, each in place on a contiguous tensor (CS336 A2 2026 section 8.1).

N is the number of ranks, S the bytes of the tensor. On a ring every rank sends to its right neighbor and receives from
its left one at the same time, so that each link carries data in each step.
"""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lmcore.config import named
from lmcore.errors import require

Group = dist.ProcessGroup | None

ADDITION = "lmcore.fast.kernels.addition:add_"
"""What adds large chunks beside a message, on a part of the GPU."""

LARGE = 64 * 2**20
"""Bytes of a chunk from which a reduce-scatter hides its sums: below, the messages that it takes more cost more."""


def use_all_channels() -> None:
    """Lets NCCL send large messages through all of its channels. To be called before a process's first group is made.

    NCCL adds channels to a message until none has more than 32 pieces; pieces of 128 KiB instead of 512 KiB are enough
    for all channels at 128 MiB. Who has set NCCL_P2P_NVL_CHUNKSIZE keeps it.
    """
    os.environ.setdefault("NCCL_P2P_NVL_CHUNKSIZE", str(128 * 1024))


@contextlib.contextmanager
def registered_memory(group: Group = None) -> Iterator[None]:
    """Inside, new tensors lie in memory that the group's NCCL knows: it writes a message where it belongs, without a
    buffer on the way (user buffer registration, in NCCL's user guide). With gloo, and on a GPU to which NCCL's
    allocator gives no memory (a single one without NVLink multicast, say), it does nothing.

    All ranks of the group must enter it. Use the tensors inside only, and delete them there, so that their memory is
    free again. Until then PyTorch does not reuse what a message went through: give a ring its `buffer`.
    """
    if dist.get_backend(group) != "nccl":
        yield
        return
    device = torch.device("cuda", torch.cuda.current_device())
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the group's communicator
    backend = (group or dist.group.WORLD)._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        yield
        return
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    try:
        with torch.cuda.use_mem_pool(pool):
            yield
    finally:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)


def start_exchange(send: Tensor, to: int, receive: Tensor, source: int, group: Group = None) -> list[dist.Work]:
    """Starts to send one tensor to rank `to` of the group and to receive another from rank `source`: wait for both."""
    operations = [
        dist.P2POp(dist.isend, send, group=group, group_peer=to),
        dist.P2POp(dist.irecv, receive, group=group, group_peer=source),
    ]
    return dist.batch_isend_irecv(operations)


def chunks_of(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """Views of a contiguous tensor, one for each rank; their lengths differ by at most one element."""
    require(tensor.is_contiguous(), "A collective works in place and needs a contiguous tensor: call .contiguous().")
    return tensor.view(-1).tensor_split(dist.get_world_size(group))


def ring_reduce_scatter(tensor: Tensor, group: Group = None, buffer: Tensor | None = None) -> Tensor:
    """Sums the tensors of all ranks; afterwards chunk i is complete on rank i, and is returned there.

    N - 1 steps of S / N bytes. The other chunks hold partial sums. Large chunks go in two halves: while one is added,
    the other is on its way. `buffer`, at least as long as the longest chunk, receives them. Give one to many calls in
    a row: the memory that a call takes for itself is free again only when the GPU has come so far.
    """
    rank, size, chunks = dist.get_rank(group), dist.get_world_size(group), chunks_of(tensor, group)
    if size == 1:
        return chunks[rank]
    buffer = torch.empty_like(chunks[0]) if buffer is None else buffer
    large = chunks[0].nbytes >= LARGE
    parts = 2 if large else 1
    halves = [chunk.tensor_split(parts) for chunk in chunks]
    buffers = buffer.view(-1)[: chunks[0].numel()].tensor_split(parts)
    under_way: dict[int, tuple[list[dist.Work], Tensor, Tensor]] = {}

    def add_arrived(part: int) -> None:
        works, sums, received = under_way[part]
        for work in works:
            work.wait()
        # while the other half is on its way, NCCL needs a part of the GPU
        named(ADDITION)(sums, received) if large else sums.add_(received)

    for step in range(1, size):
        for part, received in enumerate(buffers):
            if step > 1:
                add_arrived(part)
            leaving, sums = halves[(rank - step) % size][part], halves[(rank - step - 1) % size][part]
            arriving = received[: sums.numel()]
            works = start_exchange(leaving, (rank + 1) % size, arriving, (rank - 1) % size, group)
            under_way[part] = works, sums, arriving
    for part in under_way:
        add_arrived(part)
    return chunks[rank]


def ring_all_gather(tensor: Tensor, group: Group = None) -> None:
    """Gives every rank all chunks, where rank i has chunk i of the tensor at first. N - 1 steps of S / N bytes."""
    rank, size, chunks = dist.get_rank(group), dist.get_world_size(group), chunks_of(tensor, group)
    for step in range(size - 1):
        leaving, arriving = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        for work in start_exchange(leaving, (rank + 1) % size, arriving, (rank - 1) % size, group):
            work.wait()


def ring_all_reduce(tensor: Tensor, group: Group = None, buffer: Tensor | None = None) -> None:
    """Sums the tensors of all ranks on every rank: reduce-scatter, then all-gather. 2 (N - 1) steps of S / N bytes."""
    ring_reduce_scatter(tensor, group, buffer)
    ring_all_gather(tensor, group)
