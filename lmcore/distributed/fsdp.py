"""Fully sharded data parallelism (CS336 A2 2026 section 7; ZeRO stage 3, Rajbhandari et al. 2020).

Every rank keeps some rows of each matrix, and only their gradients and optimizer state. A layer's whole matrix is
gathered shortly before its forward pass and again before its backward pass, and freed afterwards; its gradient is
summed and scattered. Norms and biases are small: every rank has them whole, and averages their gradients.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmcore.distributed.collectives import Group
from lmcore.distributed.ddp import broadcast_state
from lmcore.optimizer import gradient_norm

# PyTorch 2.13 has new names for these
all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_rows = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

AHEAD = 2
"""A layer's weight begins to be gathered when the layer this many places before it has done its forward pass."""
UNREDUCED = 2
"""Whole gradients that may wait for the network at a time during the backward pass."""


def holds_matrix(module: nn.Module) -> bool:
    """Whether this is a linear layer or an embedding, PyTorch's, ours or the course's: what is sharded."""
    weight = module._parameters.get("weight")
    return type(module).__name__ in ("Linear", "Embedding") and weight is not None and weight.ndim == 2


class ShardedWeight:
    """The weight of one layer: this rank's rows, always, and the whole matrix, while it is needed.

    `shard` (rows / N rounded up, columns) is the parameter; the last ranks' shards end in rows of zeros. `whole`
    (rows, columns) is a view of a buffer of N shards, whose memory is there only from `gather` to `free`.
    """

    def __init__(self, shard: nn.Parameter, rows: int, compute_dtype: torch.dtype | None, group: Group):
        self.shard, self.rows, self.group, self.size = shard, rows, group, dist.get_world_size(group)
        self.dtype = compute_dtype or shard.dtype
        buffer = torch.empty(self.size * len(shard), shard.shape[1], dtype=self.dtype, device=shard.device)
        self.bytes, self.buffer, self.whole = buffer.nbytes, buffer, buffer[:rows]
        self.work: dist.Work | None = None
        self.free()

    def gather(self) -> None:
        """Begins to gather the whole matrix, in the type that is computed in, unless it is there or on its way."""
        if self.buffer.untyped_storage().nbytes() == 0:
            self.buffer.untyped_storage().resize_(self.bytes)
            own = self.shard.detach().to(self.dtype)
            # .data: autograd has saved this buffer, and gets the same values back
            self.work = all_gather_rows(self.buffer.data, own, group=self.group, async_op=True)

    def wait(self) -> None:
        """Until the whole matrix is there."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def free(self) -> None:
        """Gives the memory of the whole matrix back."""
        self.wait()
        self.buffer.untyped_storage().resize_(0)

    def begin_reduce(self, gradient: Tensor) -> tuple[dist.Work, Tensor, Tensor]:
        """Begins to sum a gradient of the whole matrix, from which this rank gets its rows."""
        missing = len(self.buffer) - len(gradient)
        padded = nn.functional.pad(gradient, (0, 0, 0, missing)) if missing else gradient.contiguous()
        own = torch.empty_like(padded[: len(self.shard)])
        return reduce_scatter_rows(own, padded, group=self.group, async_op=True), own, padded

    def end_reduce(self, work: dist.Work, own: Tensor, _: Tensor) -> None:
        """Adds the average over the ranks to the shard's gradient, in the shard's type."""
        work.wait()
        average = own.to(self.shard.dtype) / self.size
        self.shard.grad = average if self.shard.grad is None else self.shard.grad + average


class Whole(torch.autograd.Function):
    """From shard to whole matrix; its backward pass begins to sum and scatter the gradient, and frees the matrix."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, weight: ShardedWeight, fsdp: "FSDP") -> Tensor:
        ctx.weight, ctx.fsdp = weight, fsdp
        return weight.whole.data  # no view: autograd gives it a history of its own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # the shard's comes later, from end_reduce
        ctx.weight.free()
        ctx.fsdp.reduce(ctx.weight, gradient)
        return None, None, None


class FSDP(nn.Module):
    """Wraps a model: its linear layers and embeddings are sharded, all else is replicated.

    Use it as the classes of `ddp`: forward, backward, `finish_gradient_synchronization`, optimizer step.
    `parameters()` are the shards and the replicated parameters; an optimizer that treats elements one by one, such as
    AdamW, updates them as it would the whole. With `compute_dtype` matrices are cast before they are sent, layers
    compute in that type, and shards, gradients and updates stay in the model's own. A weight is whole only while its
    layer is called. The group's rank 0 gives all ranks their initial weights.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None, group: Group = None):
        super().__init__()
        self.module, self.group, self.size = module, group, dist.get_world_size(group)
        broadcast_state(module, group)
        shards: dict[int, nn.Parameter] = {}  # tied weights stay tied
        self.rows: dict[nn.Parameter, int] = {}
        self.weights: dict[nn.Module, ShardedWeight] = {}
        for layer in module.modules():
            if holds_matrix(layer):
                whole = layer._parameters["weight"]
                if id(whole) not in shards:
                    shards[id(whole)] = self.shard_of(whole)
                    self.rows[shards[id(whole)]] = len(whole)
                layer.weight = shards[id(whole)]
                self.weights[layer] = ShardedWeight(layer.weight, len(whole), compute_dtype, group)
                layer.register_forward_pre_hook(self.before_forward)
                layer.register_forward_hook(self.after_forward)
        self.order: list[nn.Module] = []  # layers as the last forward pass ran them
        self.at = 0
        self.reducing: deque[tuple[ShardedWeight, tuple]] = deque()

    def shard_of(self, whole: nn.Parameter) -> nn.Parameter:
        """This rank's rows of a matrix, in memory of their own, with rows of zeros where there are no more."""
        count, rank = -(-len(whole) // self.size), dist.get_rank(self.group)
        shard = torch.zeros(count, whole.shape[1], dtype=whole.dtype, device=whole.device)
        own = whole.data[rank * count : (rank + 1) * count]
        shard[: len(own)] = own
        return nn.Parameter(shard, requires_grad=whole.requires_grad)

    def forward(self, *inputs, **kwargs):
        self.at = 0
        for layer in self.order[:AHEAD]:
            self.weights[layer].gather()
        return self.module(*inputs, **kwargs)

    def before_forward(self, layer: nn.Module, _: Any) -> None:
        """Puts the whole matrix in the place of the shard."""
        if self.order[self.at : self.at + 1] != [layer]:  # the first pass, or another order than the last time
            for other in self.order[self.at :]:
                self.weights[other].free()
            self.order[self.at :] = [layer]
        weight = self.weights[layer]
        weight.gather()
        weight.wait()
        layer.__dict__["weight"] = Whole.apply(weight.shard, weight, self)

    def after_forward(self, layer: nn.Module, _: Any, output: Tensor) -> None:
        """Frees the matrix, begins to gather a later one, and has this one gathered again before the backward pass."""
        del layer.__dict__["weight"]
        weight, place = self.weights[layer], self.at
        weight.free()
        self.at += 1
        for later in self.order[place + AHEAD : place + AHEAD + 1]:
            self.weights[later].gather()
        if output.requires_grad and type(layer).__name__ != "Embedding":  # whose backward pass needs no weight
            output.register_hook(lambda _: self.before_backward(place))

    def before_backward(self, place: int) -> None:
        """Gathers a layer's matrix, if it is not on its way already, and begins with that of the layer before it."""
        weight = self.weights[self.order[place]]
        weight.gather()
        earlier = [layer for layer in self.order[:place] if type(layer).__name__ != "Embedding"]
        if earlier:
            self.weights[earlier[-1]].gather()
        weight.wait()

    def reduce(self, weight: ShardedWeight, gradient: Tensor) -> None:
        """Begins to sum and scatter a gradient; waits for an earlier one where too many are on their way."""
        self.reducing.append((weight, weight.begin_reduce(gradient)))
        self.end_reductions(UNREDUCED)

    def end_reductions(self, left: int = 0) -> None:
        """Waits until at most so many gradients are on their way."""
        while len(self.reducing) > left:
            weight, begun = self.reducing.popleft()
            weight.end_reduce(*begun)

    def finish_gradient_synchronization(self) -> None:
        """Between backward pass and optimizer step: afterwards all gradients are averages over the ranks."""
        self.end_reductions()
        for weight in self.weights.values():
            weight.free()  # of layers whose weights are not trained
        for parameter in self.module.parameters():
            if parameter not in self.rows and parameter.grad is not None:  # replicated
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.size

    def gather_full_params(self) -> dict[str, Tensor]:
        """All parameters whole, by their names in the model. Every rank has to call it."""
        whole = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters():
            if (rows := self.rows.get(parameter)) is not None:
                gathered = parameter.new_empty(self.size * len(parameter), parameter.shape[1])
                all_gather_rows(gathered, whole[name], group=self.group)
                whole[name] = gathered[:rows]
        return whole

    def clip_gradients(self, max_l2_norm: float, eps: float = 1e-6) -> Tensor:
        """`lmcore.optimizer.gradient_clipping` of all ranks' gradients together; returns their norm before it."""
        trained = [p for p in self.module.parameters() if p.grad is not None]
        sharded, others = ([p.grad for p in trained if (p in self.rows) == here] for here in (True, False))
        square = gradient_norm(sharded).square() if sharded else trained[0].grad.new_zeros(())
        dist.all_reduce(square, group=self.group)
        norm = gradient_norm([square.sqrt(), *others])
        scale = torch.clamp(max_l2_norm / (norm + eps), max=1.0)
        for parameter in trained:
            parameter.grad.mul_(scale)
        return norm
