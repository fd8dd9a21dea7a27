"""What the ranks of a sharded step send each other (ZeRO, Rajbhandari et al. 2020).

`Exchange`, stage 1: gradients go to their owners, updated weights back to all. Layers lie one behind the other in
packed tensors. Of a run of layers that the ranks share evenly each rank owns neighbours, so that one reduce-scatter and
one all-gather, both in place, serve a whole run for each kind of matrix. Of the rest each parameter is a message of its
own.

`Shards`, stage 3: a rank has some rows of every matrix, of its gradient and of its moments. Weights are whole while a
layer needs them.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmcore.distributed.fsdp import all_gather_rows, reduce_scatter_rows
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.errors import require
from lmcore.fast.model import MOST_LAYERS, FusedTransformer
from lmcore.fast.packing import norm_weights_of
from lmcore.fast.streams import SideStream
from lmcore.model import TransformerLM

Message = dist.distributed_c10d._CoalescingManager
"""What has begun to be sent; its `wait` is that of a `dist.Work`."""


def shared_runs(num_layers: int, ranks: int) -> list[range]:
    """Runs of up to `MOST_LAYERS` layers that the ranks share evenly, the last ones first; less than a run is left."""
    runs, stop = [], num_layers
    while stop >= ranks:
        length = ranks * max(1, min(MOST_LAYERS, stop) // ranks)
        runs.append(range(stop - length, stop))
        stop -= length
    return runs


def owners_by_layer(model: TransformerLM, ranks: int) -> dict[nn.Parameter, int]:
    """The rank of each matrix in `shared_runs`, and of the norm weights, all on rank 0; others may be anywhere."""
    owners = dict.fromkeys(norm_weights_of(model), 0)
    for run in shared_runs(model.config.num_layers, ranks):
        for layer in run:
            owners = dict.fromkeys(model.layers[layer].parameters(), (layer - run.start) * ranks // len(run)) | owners
    return owners


class Exchange:
    """The messages of a step of `transformer` whose parameters belong to the ranks as `optimizer` says.

    Raises `UserError` unless the owners are those of `owners_by_layer`.
    """

    def __init__(self, transformer: FusedTransformer, optimizer: ShardedOptimizer):
        self.transformer, self.owner, self.rank = transformer, optimizer.owner, optimizer.rank
        self.ranks = optimizer.world_size
        together = owners_by_layer(transformer.model, self.ranks)
        as_planned = all(self.owner[p] == rank for p, rank in together.items())
        require(as_planned, "The optimizer of a fused step needs the owners that owners_by_layer names.")
        runs = shared_runs(transformer.config.num_layers, self.ranks)
        self.waiting = {run: set(run) for run in runs}  # for the gradients of these layers
        self.norms = torch.empty_like(transformer.norm_weight_grads)
        self.part_of = {p: part for p, part in transformer.parts.items() if p not in together}

    def reduce(self, parts: Collection[int], how: dist.ReduceOp) -> list[tuple[dist.Work, Tensor]]:
        """Begins to send the gradients of these `parts`, once each in a step; the messages, and what arrives here."""
        found = []
        for run, waiting in self.waiting.items():
            waiting_before = bool(waiting)
            waiting.difference_update(part - 1 for part in parts)
            if waiting_before and not waiting:
                for kind in self.transformer.grads.of_layers(run):
                    own = kind.chunk(self.ranks)[self.rank]
                    found.append((reduce_scatter_rows(own, kind, how, async_op=True), own))
        for p in (p for p, part in self.part_of.items() if part in parts):
            gradient = self.transformer.gradients[p]
            found.append((dist.reduce(gradient, self.owner[p], how, async_op=True), gradient))
        if 0 in parts:  # the last ones
            gradient = self.transformer.norm_weight_grads
            found.append((dist.all_reduce(gradient, how, async_op=True), gradient))
            self.waiting = {run: set(run) for run in self.waiting}
        return found

    def gather(self) -> None:
        """Sends everybody the weights that the next step computes with, and the norm weights, from their owners."""
        sent, weights = [], self.transformer.norm_weights
        for run in self.waiting:
            for kind in self.transformer.weights.of_layers(run):
                sent.append(all_gather_rows(kind, kind.chunk(self.ranks)[self.rank], async_op=True))
        for p in self.part_of:
            sent.append(dist.broadcast(self.transformer.compute_weights.get(p, p.data), self.owner[p], async_op=True))
        torch._foreach_copy_(list(self.norms), [p.data for p in weights])
        dist.broadcast(self.norms, 0)
        torch._foreach_copy_([p.data for p in weights], list(self.norms))
        for work in sent:
            work.wait()


def coalesced(collective: Callable[..., dist.Work], pairs: Iterable[tuple[Tensor, Tensor]], *how: Any) -> Message:
    """Begins a collective for each pair of tensors, with NCCL in one message: many small ones do not fill a network.

    `_coalescing_manager` has no public name in PyTorch 2.11 to 2.13.
    """
    together = dist.get_backend() == "nccl"  # gloo's form of it ended in crashes in about one of fifty short runs
    with dist._coalescing_manager(async_ops=True) if together else nullcontext(Message()) as message:
        works = [collective(*pair, *how, async_op=True) for pair in pairs]
    message.works = message.works or works  # the one of all, or each of them
    return message


class Shards:
    """The messages of a step of `transformer`, of whose matrices each of `ranks` has its rows alone.

    Weights of a part are cast and gathered while the two parts before it, in the direction of the pass, are computed;
    those of a layer once more in the backward pass, unless they are still there. Whole gradients of a part leave as
    soon as they are final.
    """

    def __init__(self, transformer: FusedTransformer, ranks: int):
        self.transformer, self.ranks, self.rank = transformer, ranks, dist.get_rank()
        self.casts = SideStream(transformer.device)
        self.matrices: dict[int, list[nn.Parameter]] = {}
        for p, part in transformer.parts.items():
            if p in transformer.weights.views:
                self.matrices.setdefault(part, []).append(p)
        self.held: dict[int, int] = {}  # the part whose weights are, or will be, at a place
        self.arriving: dict[int, Message] = {}  # by part
        self.leaving: dict[int, Message] = {}  # by place of a layer's gradients
        transformer.fetch, transformer.vacate = self.fetch, self.vacate

    def fetch(self, part: int, step: int) -> None:
        """Lets the current stream wait for the weights of a part; begins to gather those that `step` leads to next."""
        if part == 0:  # a new pass: the weights have changed
            for known in (self.held, self.arriving, self.leaving):
                known.clear()
        first, last = (0, 1 + self.transformer.config.num_layers) if step > 0 else (1, part)
        for wanted in (part, part + step, part + 2 * step):
            layer = 1 <= wanted <= self.transformer.config.num_layers
            place = self.transformer.weights.slot(wanted - 1) if layer else -1 - wanted
            if first <= wanted <= last and wanted in self.matrices and self.held.get(place) != wanted:
                self.held[place] = wanted
                with self.casts():
                    self.arriving[wanted] = self._gather(wanted)
        if part in self.arriving:
            self.arriving.pop(part).wait()

    def _gather(self, part: int) -> Message:
        """Begins to send this rank's rows of a part to all; they are cast where the whole matrices will be."""
        whole = [self.transformer.weights.views[p] for p in self.matrices[part]]
        own = [matrix.chunk(self.ranks)[self.rank] for matrix in whole]
        for mine, p in zip(own, self.matrices[part], strict=True):
            mine.copy_(p.detach())
        return coalesced(all_gather_rows, zip(whole, own, strict=True))

    def vacate(self, layers: range) -> None:
        """Lets the current stream wait until gradients of other layers have left the place of those of `layers`."""
        for place in map(self.transformer.grads.slot, layers):
            if place in self.leaving:
                self.leaving.pop(place).wait()

    def reduce(self, parts: Collection[int], how: dist.ReduceOp) -> list[tuple[dist.Work | Message, Tensor]]:
        """Begins to sum and scatter the gradients of these `parts`; the messages, and what arrives here."""
        found: list[tuple[dist.Work | Message, Tensor]] = []
        for part in sorted(self.matrices.keys() & parts):
            own = [self.transformer.gradients[p] for p in self.matrices[part]]
            whole = [self.transformer.grads.views[p] for p in self.matrices[part]]
            sent = coalesced(reduce_scatter_rows, zip(own, whole, strict=True), how)
            found += [(sent, gradient) for gradient in own]
            if 1 <= part <= self.transformer.config.num_layers:
                self.leaving[self.transformer.grads.slot(part - 1)] = sent
        if 0 in parts:
            gradient = self.transformer.norm_weight_grads
            found.append((dist.all_reduce(gradient, how, async_op=True), gradient))
        return found

    def counted_again(self) -> Tensor:
        """What the sum of all ranks' squares has too much on each: every rank has all gradients of the norms."""
        return (1 - 1 / self.ranks) * self.transformer.norm_weight_grads.square().sum()
