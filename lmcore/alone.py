"""A run of one process: its ranks, of which there is one, and its strategy, which divides nothing.

`lmcore.distributed` has the others: `world.World`, several ranks, and `strategies` that divide the work.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.checkpoint import restore
from lmcore.config import TrainConfig, differing
from lmcore.device import select_device
from lmcore.errors import require
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer, gradient_clipping


class OneRank:
    """The ranks of a run that has one. Rank 0 writes the run folder; what holds for all is agreed by all, in order.

    What several ranks do is made of `gather`, `checked` and `sum`.
    """

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what the run leaves."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This rank's device. Raises `UserError` where it has none of its own."""
        return select_device(name)[0]

    def agree(self, stop: bool) -> bool:
        """Whether a rank wanted to stop before the last step; to be asked ahead of every step, by all ranks."""
        return stop

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, on all of them."""
        return [value]

    @contextmanager
    def checked(self) -> Iterator[None]:
        """A block in which what one rank refuses ends all: the first such rank raises its `UserError`, others exit."""
        yield

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, which alone calls it. A `UserError` of it ends all."""
        with self.checked():
            value = make() if self.is_first else None
        return self.gather(value)[0]

    def require_same(self, what: dict[str, Any]) -> None:
        """Raises `UserError` naming the fields in which the ranks differ, which must all have the same."""
        everyone = self.gather(what)
        with self.checked():
            for rank, theirs in enumerate(everyone):
                differences = differing(everyone[0], theirs, ("on rank 0", f"on rank {rank}"))
                require(not differences, f"The ranks were started with different settings: {differences}.")

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place, on the tensor's device."""
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the ranks, in place."""
        return self.sum(tensor).div_(self.size)

    def before_exit(self, call: Callable[[Any], Any]) -> None:
        """What is to be called, with the reason, before another rank's end ends this process."""


ALONE = OneRank()


class Alone:
    """The strategy of one process: nothing is divided. Those of several ranks change what they must.

    `model` has the parameters; `module` is what a forward pass calls.
    """

    def __init__(self, model: TransformerLM, config: TrainConfig | None = None):
        self.model, self.config = model, config
        self.module: nn.Module = model

    def optimizer(self) -> Optimizer:
        """The configured optimizer over what this rank updates."""
        return build_optimizer(self.model, self.config.optimizer)

    def finish(self) -> None:
        """Between backward pass and clipping: gradients are averages over the ranks afterwards."""

    def clip(self) -> Tensor:
        """Clips the gradients by the norm of all of them, and returns that norm."""
        return gradient_clipping(self.model.parameters(), self.config.optimizer.max_grad_norm or math.inf)

    def stored(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A parameter or a moment of one: a DTensor where this rank has a part of it, with the same memory."""
        return tensor

    def weights(self, ranks: OneRank) -> dict[str, Any]:
        """The model's state dict as one process has it, on rank 0. Every rank calls it."""
        return self.model.state_dict()

    def moments(self, optimizer: Optimizer, ranks: OneRank) -> dict[str, Any]:
        """The same of the optimizer."""
        return optimizer.state_dict()

    def load(self, content: dict[str, Any], optimizer: Optimizer, name: str) -> int:
        """Takes over what this rank keeps of a whole checkpoint; returns the iteration."""
        return restore(content, self.model, optimizer, name)
