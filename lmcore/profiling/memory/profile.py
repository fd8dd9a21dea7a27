"""Memory of one step: peaks, and every allocation with its category, stage and source (CS336 A2, 2025 §1.1.6)."""

import contextlib
import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from lmcore.device import device_name, select_device
from lmcore.files import atomic_write
from lmcore.profiling.memory.recording import PEAKS, record_cpu, record_cuda, storage_address
from lmcore.profiling.memory.snapshot import Event
from lmcore.profiling.memory.timeline import explained, summary, with_forward_stages
from lmcore.profiling.workload import Span, Workload, WorkloadConfig

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
    workload = prepared(config)
    found, snapshot = explained_step(workload.step, workload.device, partial(storages_of, workload))
    kept = None
    if snapshot and keep_snapshot:  # for pytorch.org/memory_viz
        with atomic_write(folder / SNAPSHOT) as file:
            pickle.dump(snapshot, file)
        kept = {"file": SNAPSHOT, "bytes": (folder / SNAPSHOT).stat().st_size}
    return found | {"snapshot": kept}


def explained_step(
    step: Callable[[Span], Any], device: torch.device, owned: Callable[[], Mapping[int, Event]]
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Records `step(span)`: what `profile_memory` returns, without "snapshot"; and the snapshot itself, None off CUDA.

    `owned` says which storages are known at the moment, by address; it is asked before and after the step and after
    each stage, as a step may drop its gradients. Of several stages of one name the second is "backward 2".
    """
    before, after_stage, times, on_gpu = owned(), {}, Counter(), device.type == "cuda"

    def watched(span: Span) -> Any:
        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            times[name] += 1
            numbered = name if times[name] == 1 else f"{name} {times[name]}"
            with span(numbered):
                yield
            after_stage[numbered] = owned()

        return step(stage)

    if on_gpu:
        history, peaks, snapshot = record_cuda(watched, device)
    else:
        history, peaks, snapshot = record_cpu(watched, before.values()), dict.fromkeys(PEAKS), None
    history = with_forward_stages(history)
    owners = [(history.stages[name][1], known) for name, known in after_stage.items()]
    owners = [(0, before), *owners, (len(history.seconds) - 1, owned())]
    notes = [CPU_NOTE] * (not on_gpu) + [FULL_NOTE] * history.truncated
    found = summary(explained(history, owners))
    return {"device": device_name(device), **found, **peaks, "notes": notes}, snapshot


def profile_memory_without_snapshot(config: WorkloadConfig, folder: Path) -> dict[str, Any]:
    """`profile_memory` that leaves no pickle behind, which can be hundreds of megabytes."""
    return profile_memory(config, folder, keep_snapshot=False)


def prepared(config: WorkloadConfig) -> Workload:
    """The workload after its warm-up, without gradients, on a device whose allocator can be watched.

    There is at least one warm-up step, and as many more as the optimizer needs to have its state: with loss scaling
    the first steps may be skipped.
    """
    device, _ = select_device(config.device)
    workload = Workload(dataclasses.replace(config, device=str(device) if device.type == "cuda" else "cpu"))
    for step in range(max(1, config.warmup_steps) + 20):
        if step < max(1, config.warmup_steps) or (config.mode == "train_step" and not workload.optimizer.state):
            workload.step()
    workload.optimizer.zero_grad(set_to_none=True)
    workload.synchronize()
    return workload


def storages_of(workload: Workload) -> dict[int, Event]:
    """`known_storages` of a workload, the batch among them."""
    batch = [("inputs", workload.inputs), ("targets", workload.targets)]
    return known_storages(workload.device, workload.model, workload.optimizer, batch)


def known_storages(
    device: torch.device, model: Module | None, optimizer: Any = None, others: Sequence[tuple[str, Tensor]] = ()
) -> dict[int, Event]:
    """The storages on a device that have an owner, by address: parameters, gradients, optimizer state, buffers, others.

    Parameters that only the optimizer knows go by their number in its groups.
    """
    parameters = [*model.named_parameters()] if model is not None else []
    groups = optimizer.param_groups if optimizer is not None else ()
    parameters += [(f"parameter {n}", p) for n, p in enumerate(p for group in groups for p in group["params"])]
    names = {id(p): name for name, p in reversed(parameters)}
    state = [
        (f"{key} of {names.get(id(parameter), 'a parameter')}", tensor)
        for parameter, values in (optimizer.state.items() if optimizer is not None else ())
        for key, value in values.items()
        for tensor in tree_leaves(value)
    ]
    buffers = [*model.named_buffers()] if model is not None else []
    found: dict[int, Event] = {}
    for category, tensors in (
        ("parameters", parameters),
        ("gradients", [(f"gradient of {name}", p.grad) for name, p in parameters]),
        ("optimizer state", state),
        ("other", [*buffers, *others]),
    ):
        for name, tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == device.type and tensor.untyped_storage().nbytes():
                address, size = storage_address(tensor), tensor.untyped_storage().nbytes()
                found.setdefault(address, Event(address, size, name, category))
    return found
