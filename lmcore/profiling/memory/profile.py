"""Memory of one step: peaks, and every allocation with its category, stage and source (CS336 A2, 2025 §1.1.6)."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from lmcore.device import device_name, select_device
from lmcore.files import atomic_write
from lmcore.profiling.memory.recording import PEAKS, record_cpu, record_cuda, storage_address
from lmcore.profiling.memory.snapshot import Event
from lmcore.profiling.memory.timeline import explained, summary
from lmcore.profiling.workload import Workload, WorkloadConfig

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
    standing, step = standing_storages(workload), workload.step
    on_gpu = workload.device.type == "cuda"
    if on_gpu:
        history, peaks, snapshot = record_cuda(step, workload.device)
    else:
        history, peaks, snapshot = record_cpu(step, standing.values()), dict.fromkeys(PEAKS), None
    kept = None
    if snapshot and keep_snapshot:  # for pytorch.org/memory_viz
        with atomic_write(folder / SNAPSHOT) as file:
            pickle.dump(snapshot, file)
        kept = {"file": SNAPSHOT, "bytes": (folder / SNAPSHOT).stat().st_size}
    return {
        "device": device_name(workload.device),
        **summary(explained(history, standing, gradient_storages(workload.model))),
        **peaks,
        "snapshot": kept,
        "notes": [CPU_NOTE] * (not on_gpu) + [FULL_NOTE] * history.truncated,
    }


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


def standing_storages(workload: Workload) -> dict[int, Event]:
    """The storages that are there before the step, by address: parameters, optimizer state, buffers and the batch."""
    parameters = dict(workload.model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = {
        f"{key} of {names[id(parameter)]}": value
        for parameter, values in workload.optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    others = {**dict(workload.model.named_buffers()), "inputs": workload.inputs, "targets": workload.targets}
    found: dict[int, Event] = {}
    for category, tensors in (("parameters", parameters), ("optimizer state", state), ("other", others)):
        for name, tensor in tensors.items():
            address, size = storage_address(tensor), tensor.untyped_storage().nbytes()
            if tensor.device.type == workload.device.type and size:
                found.setdefault(address, Event(address, size, name, category))
    return found


def gradient_storages(model: Module) -> dict[int, str]:
    """Names of the parameters whose gradients lie at these addresses."""
    return {storage_address(p.grad): name for name, p in model.named_parameters() if p.grad is not None}
