"""Memory of one step: peaks, and every allocation with its category, stage and source (CS336 A2, 2025 §1.1.6)."""

import contextlib
import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from lmcore.device import device_name, select_device
from lmcore.files import atomic_write
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.memory.recording import PEAKS, record_cpu, record_cuda, storage_address
from lmcore.profiling.memory.snapshot import Event
from lmcore.profiling.memory.timeline import explained, summary, with_forward_stages
from lmcore.profiling.workload import Span, Step, Workload

Owned = Callable[[], Iterable[tuple[str, str, Tensor]]]
"""Says what owns memory at the moment: category, name and tensor (see `tensors_of`)."""

SNAPSHOT = "memory_snapshot.pickle"

CPU_NOTE = "The storages of tensors on the CPU were recorded: only CUDA's allocator keeps a history of its own."
FULL_NOTE = "The record was full: its first events are lost, and what was alive then counts as there before."


def profile_memory(config: WorkloadConfig, folder: Path, keep_snapshot: bool = True) -> dict[str, Any]:
    """Records every allocation of one step of `config.mode` and says what the memory was for (a `run_cases` task).

    After the warm-up (at least one step, so that the optimizer's state exists) one step is recorded, from dropped
    gradients on: with the CUDA allocator's history on a GPU, else by the lives of the tensors' storages on the CPU.
    Bytes are those requested by tensors. Seconds are those of the host, which asks for memory ahead of the GPU's work.

    Returns the name of the "device"; the keys of `lmcore.profiling.memory.timeline.summary`; the allocator's own
    `PEAKS`, None off CUDA; "snapshot", {"file": name in `folder`, "bytes": size} or None; and "notes", sentences.

    Categories: "parameters" and "optimizer state"; "other", what else was there before (the batch, buffers);
    "gradients", what the parameters' gradients lie in when the backward pass ends; "activations", what forward and loss
    allocate and is alive when the backward pass begins (none in inference; autocast's copies of weights that live so
    long are); "temporary", everything else. Sources of storages with a name are that name ("layers.0.ffn.w1.weight",
    "gradient of …", "m of …", "inputs").
    """
    device, _ = select_device(config.device)
    workload = Workload(dataclasses.replace(config, device=str(device) if device.type == "cuda" else "cpu"))
    for _ in range(max(1, config.warmup_steps)):
        workload.step()
    workload.optimizer.zero_grad(set_to_none=True)
    found, snapshot = explained_step(workload.step, workload.device, partial(owned_by, workload))
    kept = None
    if snapshot and keep_snapshot:  # for pytorch.org/memory_viz
        with atomic_write(folder / SNAPSHOT) as file:
            pickle.dump(snapshot, file)
        kept = {"file": SNAPSHOT, "bytes": (folder / SNAPSHOT).stat().st_size}
    return found | {"snapshot": kept}


def explained_step(step: Step, device: torch.device, owned: Owned) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Records `step(span)`: what `profile_memory` returns, without "snapshot"; and the snapshot itself, None off CUDA.

    `owned` is asked before and after the step and after each stage, as a step may drop its gradients. Of several stages
    of one name the second is "backward 2".
    """
    known = partial(known_storages, device, owned)
    before, after_stage, times, on_gpu = known(), {}, Counter(), device.type == "cuda"

    def watched(span: Span) -> Any:
        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            times[name] += 1
            numbered = name if times[name] == 1 else f"{name} {times[name]}"
            with span(numbered):
                yield
            after_stage[numbered] = known()

        return step(stage)

    if on_gpu:
        history, peaks, snapshot = record_cuda(watched, device)
    else:
        history, peaks, snapshot = record_cpu(watched, before.values(), owned()), dict.fromkeys(PEAKS), None
    history = with_forward_stages(history)
    owners = [(history.stages[name][1], there) for name, there in after_stage.items()]
    owners = [(0, before), *owners, (len(history.seconds) - 1, known())]
    notes = [CPU_NOTE] * (not on_gpu) + [FULL_NOTE] * history.truncated
    found = summary(explained(history, owners))
    return {"device": device_name(device), **found, **peaks, "notes": notes}, snapshot


def profile_memory_without_snapshot(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`profile_memory` that leaves no pickle behind, which can be hundreds of megabytes."""
    return profile_memory(config, folder, keep_snapshot=False)


def owned_by(workload: Workload) -> Iterator[tuple[str, str, Tensor]]:
    """`tensors_of` a workload, the batch among them."""
    return tensors_of(workload.model, workload.optimizer, {"inputs": workload.inputs, "targets": workload.targets})


def tensors_of(
    model: Module | None, optimizer: Any = None, others: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """What owns memory between steps: category, name and tensor of parameters, gradients, optimizer state and buffers.

    `others` are other tensors by name. Parameters that only the optimizer knows go by their number in its groups.
    """
    parameters = [*model.named_parameters()] if model is not None else []
    groups = optimizer.param_groups if optimizer is not None else ()
    parameters += [(f"parameter {n}", p) for n, p in enumerate(p for group in groups for p in group["params"])]
    names = {id(p): name for name, p in reversed(parameters)}
    yield from (("parameters", name, p) for name, p in parameters)
    yield from (("gradients", f"gradient of {name}", p.grad) for name, p in parameters if p.grad is not None)
    for parameter, values in optimizer.state.items() if optimizer is not None else ():
        for key, value in values.items():
            owner = names.get(id(parameter), "a parameter")
            yield from (
                ("optimizer state", f"{key} of {owner}", t) for t in tree_leaves(value) if isinstance(t, Tensor)
            )
    buffers = dict(model.named_buffers()) if model is not None else {}
    yield from (("other", name, tensor) for name, tensor in (buffers | dict(others or {})).items())


def known_storages(device: torch.device, owned: Owned) -> dict[int, Event]:
    """The storages on the device that have an owner now, by address; one with several belongs to the first."""
    found: dict[int, Event] = {}
    for category, name, tensor in owned():
        address, size = storage_address(tensor), tensor.untyped_storage().nbytes()
        if tensor.device.type == device.type and size:
            found.setdefault(address, Event(address, size, name, category))
    return found
