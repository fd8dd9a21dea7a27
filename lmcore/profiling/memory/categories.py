"""What the memory of a step is for: category, stage and name of every allocation."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmcore.profiling.memory.snapshot import NO_FRAME, Allocation, Event, History
from lmcore.profiling.workload import Workload


@dataclass(frozen=True)
class Known:
    """A storage that was there before the step: what it is for, and its name."""

    category: str
    name: str
    bytes: int


Standing = dict[int, Known]
"""The known storages by address."""


def standing_storages(workload: Workload) -> Standing:
    """The storages that are there before the step: parameters, optimizer state, buffers and the batch."""
    parameters = dict(workload.model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: Standing = {}

    def note(tensor: Tensor, category: str, name: str) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == workload.device.type and storage.nbytes():
            found.setdefault(storage.data_ptr(), Known(category, name, storage.nbytes()))

    for name, parameter in parameters.items():
        note(parameter, "parameters", name)
    for parameter, state in workload.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                note(value, "optimizer state", f"{key} of {names[id(parameter)]}")
    for name, buffer in workload.model.named_buffers():
        note(buffer, "other", name)
    note(workload.inputs, "other", "inputs")
    note(workload.targets, "other", "targets")
    return found


def standing_events(standing: Standing) -> list[Event]:
    """The known storages as a history's beginning, for a profiler that sees only what happens under it."""
    return [Event(address, known.bytes, 0.0, known.name) for address, known in standing.items()]


def explained(history: History, standing: Standing, gradients: Mapping[int, str], copies: Mapping[int, str]) -> History:
    """The history with category, stage and source of every allocation (see `profile_memory`).

    `gradients` and `copies` name the storages, by address, that hold gradients when the backward pass ends, and
    half-precision copies of parameters when it begins.
    """
    backward = next((stage for stage in history.stages if stage.name == "backward"), None)

    def explain(a: Allocation) -> Allocation:
        if a.first == 0:
            known = standing.get(a.address)
            unnamed = "there before, without a name" if a.source == NO_FRAME else a.source  # such as workspaces
            found = (known.category, known.name) if known else ("other", unnamed)
            return dataclasses.replace(a, category=found[0], source=found[1])
        stage = next((stage.name for stage in history.stages if stage.first < a.first <= stage.last), None)
        source = f"{stage or 'between stages'}, {NO_FRAME}" if a.source == NO_FRAME else a.source
        category = "temporary"
        if backward and a.first <= backward.last < a.last and a.address in gradients:
            category, source = "gradients", f"gradient of {gradients[a.address]}"
        elif backward and stage in ("forward", "loss") and a.last > backward.first:
            category = "activations"
            source = f"{copies[a.address]}, {source}" if a.address in copies else source
        elif stage == "backward" and a.source.startswith("lmcore/") and "workload.py" not in a.source:
            source = f"{source}, computed again"
        return dataclasses.replace(a, category=category, stage=stage, source=source)

    return dataclasses.replace(history, allocations=tuple(explain(a) for a in history.allocations))


class Marks:
    """What only the running step can tell: where gradients lie when the backward pass ends, and weights' copies."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.gradients: dict[int, str] = {}
        self.copies: dict[int, str] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self.watching_copies() if name == "forward" else contextlib.nullcontext():
            yield
        if name == "backward":
            named = self.workload.model.named_parameters()
            self.gradients = {p.grad.untyped_storage().data_ptr(): n for n, p in named if p.grad is not None}

    def watching_copies(self) -> contextlib.AbstractContextManager:
        """Notes which storages saved for the backward pass are a parameter in half precision, made by autocast.

        Where nothing is copied, and in compiled code, nothing is watched, so that as little as possible is disturbed.
        """
        config = self.workload.config
        if config.passes == "forward" or config.compile or config.precision not in ("bf16", "fp16"):
            return contextlib.nullcontext()
        names = {id(parameter): name for name, parameter in self.workload.model.named_parameters()}

        def note(tensor: Tensor) -> Tensor:
            copied = copied_parameter(tensor)
            if copied is not None and tensor.dtype != copied.dtype:
                kind = str(tensor.dtype).removeprefix("torch.")
                name = names.get(id(copied), "a parameter")
                self.copies[tensor.untyped_storage().data_ptr()] = f"{kind} copy of {name}"
            return tensor.detach()  # an operation that saved its own result with its node would never be freed

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


VIEWS_AND_COPIES = ("ToCopyBackward", "TBackward", "PermuteBackward", "TransposeBackward", "ViewBackward")


def copied_parameter(tensor: Tensor) -> Tensor | None:
    """The parameter of which `tensor` is a view or a cast, nothing else having been done to it; else None."""
    node = tensor.grad_fn
    while node is not None and any(view in node.name() for view in VIEWS_AND_COPIES):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)
