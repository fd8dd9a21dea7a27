"""Collectives made of sends and receives, each in place on a contiguous tensor (CS336 A2 2026 section 8.1).

N is the number of ranks, S the bytes of the tensor. On a ring every rank sends to its right neighbor and receives from
its left one at the same time, so that each link carries data in each step.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from lmcore.errors import require

Group = dist.ProcessGroup | None


def use_all_channels() -> None:
    """Lets NCCL send large messages through all of its channels. To be called before a process's first group is made.

    NCCL adds channels to a message until none has more than 32 pieces; pieces of 128 KiB instead of 512 KiB are enough
    for all channels at 128 MiB. Who has set NCCL_P2P_NVL_CHUNKSIZE keeps it.
    """
    os.environ.setdefault("NCCL_P2P_NVL_CHUNKSIZE", str(128 * 1024))


def exchange(send: Tensor, to: int, receive: Tensor, source: int, group: Group = None) -> None:
    """Sends one tensor to rank `to` of the group, and receives another from rank `source` at the same time."""
    target, origin = (dist.get_global_rank(group, rank) if group else rank for rank in (to, source))
    operations = [
        dist.P2POp(dist.isend, send, target, group),
        dist.P2POp(dist.irecv, receive, origin, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def chunks_of(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """Views of a contiguous tensor, one for each rank; their lengths differ by at most one element."""
    require(tensor.is_contiguous(), "A collective works in place and needs a contiguous tensor: call .contiguous().")
    return tensor.view(-1).tensor_split(dist.get_world_size(group))


def ring_reduce_scatter(tensor: Tensor, group: Group = None) -> Tensor:
    """Sums the tensors of all ranks; afterwards chunk i is complete on rank i, and is returned there.

    N - 1 steps of S / N bytes. The other chunks hold partial sums.
    """
    rank, size, chunks = dist.get_rank(group), dist.get_world_size(group), chunks_of(tensor, group)
    buffer = torch.empty_like(chunks[0])
    for step in range(1, size):
        leaving, sums = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arriving = buffer[: len(sums)]
        exchange(leaving, (rank + 1) % size, arriving, (rank - 1) % size, group)
        sums += arriving
    return chunks[rank]


def ring_all_gather(tensor: Tensor, group: Group = None) -> None:
    """Gives every rank all chunks, where rank i has chunk i of the tensor at first. N - 1 steps of S / N bytes."""
    rank, size, chunks = dist.get_rank(group), dist.get_world_size(group), chunks_of(tensor, group)
    for step in range(size - 1):
        leaving, arriving = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        exchange(leaving, (rank + 1) % size, arriving, (rank - 1) % size, group)


def ring_all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Sums the tensors of all ranks on every rank: reduce-scatter, then all-gather. 2 (N - 1) steps of S / N bytes."""
    ring_reduce_scatter(tensor, group)
    ring_all_gather(tensor, group)


def tree_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    """Gives every rank the tensor of rank `root`: log2 N rounds, in each of which all that have it send it on."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    require(0 <= root < size, f"root must be a rank from 0 to {size - 1}, not {root}.")
    place, reach = (rank - root) % size, 1  # the first `reach` places have it
    while reach < size:
        partner = place + reach if place < reach else place - reach
        if place < 2 * reach and partner < size:
            other = (partner + root) % size
            other = dist.get_global_rank(group, other) if group else other
            if place < reach:
                dist.send(tensor, other, group)
            else:
                dist.recv(tensor, other, group)
        reach *= 2
