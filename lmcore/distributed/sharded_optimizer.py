"""An optimizer whose state is divided among the ranks (CS336 A2 section 6; ZeRO stage 1, Rajbhandari et al. 2020)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.distributed.collectives import Group


class ShardedOptimizer(Optimizer):
    """Each parameter belongs to one rank, which alone has its optimizer state, updates it, and broadcasts it.

    `params` and `kwargs` are those of `optimizer_cls`, any optimizer of PyTorch that treats its parameters one by one.
    `owners` says whose a parameter is; of others the largest are dealt out first, each to the rank that has the fewest
    elements so far. For `step`, gradients must be the same on all ranks. Changes of `param_groups`, such as a
    schedule's, reach the update.
    `state_dict` and `load_state_dict` are those of the unsharded optimizer; every rank has to call them.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[Optimizer],
        *,
        process_group: Group = None,
        owners: Mapping[Tensor, int] | None = None,
        **kwargs: Any,
    ):
        self.optimizer_cls, self.kwargs, self.group, self.wanted = optimizer_cls, kwargs, process_group, owners or {}
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.owner: dict[Tensor, int] = {}
        self.load = [0] * self.world_size
        self.local: Optimizer | None = None  # of this rank's parameters, with as many groups
        defaults = optimizer_cls([nn.Parameter(torch.empty(1))], **kwargs).defaults
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and deals its parameters out among the ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        owner = {}
        for parameter in sorted(group["params"], key=lambda p: (p in self.wanted, p.numel()), reverse=True):
            least = min(range(self.world_size), key=self.load.__getitem__)
            owner[parameter] = rank = self.wanted.get(parameter, least)
            self.load[rank] += parameter.numel()
        self.owner |= {parameter: owner[parameter] for parameter in group["params"]}
        part = {**group, "params": [p for p in group["params"] if self.owner[p] == self.rank]}
        if self.local is None:
            self.local = self.optimizer_cls([part], **self.kwargs)
        else:
            self.local.add_param_group(part)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates this rank's parameters, then sends every parameter from its owner to all ranks."""
        self.follow()
        loss = self.local.step(closure, **kwargs)
        self.send({parameter: parameter.data for parameter in self.owner if parameter.grad is not None})
        return loss

    def follow(self) -> None:
        """Gives this rank's parts of the groups the whole groups' settings, such as a new learning rate."""
        for group, part in zip(self.param_groups, self.local.param_groups, strict=True):
            part.update({name: value for name, value in group.items() if name != "params"})

    def send(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Sends what `tensors` has of each parameter from its owner to all ranks, in place."""
        sent = [
            dist.broadcast(tensor, group=self.group, group_src=self.owner[parameter], async_op=True)
            for parameter, tensor in tensors.items()
        ]
        for work in sent:
            work.wait()

    def gather(self, own: Any) -> list[Any]:
        """What each rank has, on all of them."""
        parts = [None] * self.world_size
        dist.all_gather_object(parts, own, group=self.group)
        return parts

    def state_dict(self, gather: Callable[[Any], list[Any]] | None = None) -> dict[str, Any]:
        """The state that the unsharded optimizer would have, put together from all ranks, with tensors on the CPU.

        `gather` may bring the ranks' parts to a single one of them: others then get an empty state.
        """
        number = {parameter: index for index, parameter in enumerate(self.owner)}
        own = {
            number[parameter]: {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
            for parameter, values in self.local.state.items()
        }
        whole = {index: values for part in (gather or self.gather)(own) for index, values in part.items()}
        return super().state_dict() | {"state": dict(sorted(whole.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of an unsharded optimizer, or of one that was sharded over any number of ranks."""
        super().load_state_dict(state_dict | {"state": {}})
        number = {parameter: index for index, parameter in enumerate(self.owner)}
        own = [parameter for group in self.local.param_groups for parameter in group["params"]]
        state = {i: state_dict["state"][number[p]] for i, p in enumerate(own) if number[p] in state_dict["state"]}
        self.local.load_state_dict(self.local.state_dict() | {"state": state})
