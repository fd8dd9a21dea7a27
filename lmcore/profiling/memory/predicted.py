"""Predicted memory of a forward pass and of a training step: the step itself, run on tensors without memory.

Fake tensors have shapes and types but no values: a step of any size runs in seconds on any machine. The lives of their
storages give the same history as an allocator's, in the bytes that tensors ask for (`torch.cuda.max_memory_allocated`
rounds each up to 512, which matters only for toy sizes).

Not predicted: the workspace of cuBLAS, once for each thread (32 MiB on Hopper, 8.125 MiB before;
`parseChosenWorkspaceSize` in PyTorch's aten/src/ATen/cuda/CublasHandlePool.cpp), of which the backward pass has its
own; scratch memory inside a kernel; compiled models, which fuse operations. The explicit step's kernels do not run on
fake tensors: its memory is counted from shapes.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcore.config import ModelConfig, TrainConfig, replace
from lmcore.errors import require
from lmcore.fast.kernels.cross_entropy import CHUNK_BYTES, default_chunk_rows
from lmcore.fast.kernels.rope_attention import suits_whole_heads
from lmcore.fast.model import GATHERED, MOST_LAYERS, ROWS_PER_PRODUCT, UNREDUCED
from lmcore.fast.support import unsupported_reason
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer
from lmcore.profiling.memory.profile import storages_of
from lmcore.profiling.memory.recording import StorageEvents
from lmcore.profiling.memory.snapshot import Event
from lmcore.profiling.memory.timeline import explained, levels, summary
from lmcore.profiling.workload import Workload, WorkloadConfig
from lmcore.train import PlainStep

CUBLAS_WORKSPACE, MULTIPROCESSORS = 32 * 2**20, 132
"""Of a Hopper GPU: what cuBLAS takes for each stream, in bytes."""

KEYS = {"optimizer state": "optimizer_state", "other": "inputs"}
"""What `predicted_peak` calls categories."""


def predicted_peak(
    config: ModelConfig, batch_size: int = 1, precision: str = "fp32", mode: str = "train_step"
) -> dict[str, Any]:
    """The moment at which most memory is allocated, after warm-up, and what is alive then, in bytes.

    `mode` is that of `lmcore.profiling.cases.WorkloadConfig`. Keys: parameters, gradients, optimizer_state,
    activations (saved for the backward pass), temporary, inputs (token ids and position tables), peak_bytes (their
    sum), stage ("forward", "loss", "backward" or "optimizer"), moment (the source of the allocation that comes within a
    thousandth of it) and by_stage, the peak of each stage. Raises `UserError` for unknown modes or precisions and sizes
    below 1.
    """
    return copy.deepcopy(_peak(WorkloadConfig(model=config, batch_size=batch_size, mode=mode, precision=precision)))


def predicted_peak_of_rank(config: TrainConfig, ranks: int) -> int:
    """Peak bytes on rank 0 during a run's second training step, the first that has the optimizer's state.

    `config.strategy` says how the ranks divide the work: ddp, zero1 or fsdp, or any with one rank. With ops=plain the
    step is run, not compiled, whatever `compile` says, and messages go to PyTorch's fake process group, which sends
    nothing. With ops=fused it is counted (`explicit_peak`). Buffers of NCCL are not in it. Raises `UserError` for a
    batch that the ranks do not divide evenly, another way to divide the work, fp16, whose loss scale is looked at, and
    for what `explicit_peak` refuses.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    covered = config.precision != "fp16" and (ranks == 1 or config.strategy in ("ddp", "zero1", "fsdp"))
    found = f"strategy={config.strategy} in {config.precision} on {ranks} ranks"
    require(covered, f"Memory of a rank is predicted for ddp, zero1 and fsdp in fp32, tf32 and bf16, not for {found}.")
    whole = ranks > 0 and config.batch_size % ranks == 0
    require(whole, f"{ranks} ranks do not divide a batch of {config.batch_size} evenly.")
    if ranks == 1:
        config = replace(config, strategy="none")  # as a run does: there is nothing to divide
    if config.ops == "fused":
        return explicit_peak(config, ranks)
    model = TransformerLM(config.model, device="meta")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with fake_memory() as memory, resizing(memory):
            model, config = fake(model), replace(config, compile=False)
            step = PlainStep.from_config(model, config, ranks)
            ids = torch.empty(2, config.batch_size // ranks, config.model.context_length, dtype=torch.int64)
            step(*ids)
            first = len(memory.events)
            step(*ids)
            allocated = list(itertools.accumulate(event.bytes for event in memory.events))
    finally:
        dist.destroy_process_group()
    return max(allocated[first - 1 :])


def explicit_peak(config: TrainConfig, ranks: int) -> int:
    """Peak bytes of a rank in the explicit step on a Hopper GPU, counted from shapes.

    Parameters, optimizer state and gradients are there all the time. Of each layer the forward pass saves the tensors
    of `lmcore.fast.model.Group`. The peak is in the loss or in the backward pass, when three groups of layers have
    begun. Raises `UserError` for what the explicit step does not cover, another optimizer than AdamW, and no norms.
    """
    m, divided = config.model, config.strategy == "fsdp"
    reason = unsupported_reason(m, config.precision, ranks if divided else 0)
    require(reason is None, f"The explicit step does not cover {reason}.")
    require(config.optimizer.name == "adamw", "Memory of the explicit step is predicted for AdamW alone.")
    require(m.norm != "none", "Memory of the explicit step is predicted for models with norms.")
    d, d_ff, layers, size = m.d_model, m.d_ff, m.num_layers, 2 if config.precision == "bf16" else 4
    batch = config.batch_size // ranks
    rows = batch * m.context_length
    recomputes = m.checkpoint_every is not None
    most = 1 if divided or recomputes else MOST_LAYERS
    group = min(most, layers, max(1, ROWS_PER_PRODUCT // rows))

    layer, embeddings = 4 * d * d + 3 * d * d_ff, (1 if m.tie_embeddings else 2) * m.vocab_size * d
    matrices, norms = layers * layer + embeddings, (2 * layers + 1) * d
    if divided:  # parameters, moments and gradients of the own rows; whole weights and gradients of a few layers
        whole = (GATHERED + UNREDUCED) * layer + 2 * embeddings
        always = (12 + size) * matrices / ranks + size * whole + 12 * norms
    else:  # parameters, compute weights, gradients; moments
        always = (4 + 2 * size) * matrices + 4 * norms
        always += 8 * (matrices + norms) / (ranks if config.strategy == "zero1" else 1)
    partial_sums = min(rows, MULTIPROCESSORS * (4 if d <= 2048 else 2))  # of each norm's gradient (`num_partials`)
    always += 4 * norms * (1 + partial_sums) + 2 * CUBLAS_WORKSPACE

    elementwise, products = 2 * d + d_ff, 3 * d + 2 * d_ff  # outputs of norms and gate; of the projections
    recomputed = elementwise + products if recomputes else elementwise if divided else 0
    kept = 3 * d + elementwise + products - recomputed  # with the norms' inputs and attention's output
    saved = layers * rows * (size * kept + 4 * (2 + m.num_heads))  # and 1 / rms, log-sum-exp
    gradients = 5 * d * group
    chunk = default_chunk_rows(rows, size * m.vocab_size, CHUNK_BYTES) * size * m.vocab_size
    loss = chunk + rows * size * (4 * d + gradients)
    heads = (batch, m.context_length, m.num_heads, d // m.num_heads)
    without = size == 4 or (m.position == "rope" and suits_whole_heads(*heads, torch.bfloat16))
    sums = 0 if without else 4 * d  # of the queries' gradient, in float32
    backward = rows * (size * (3 * gradients + 2 * recomputed + 7 * d) + sums)
    return round(always + saved + max(loss, backward))


@contextlib.contextmanager
def fake_memory() -> Iterator[StorageEvents]:
    """Inside of the block tensors are fake, and the lives of their storages are noted."""
    with FakeTensorMode(allow_non_fake_inputs=True), StorageEvents() as memory:
        yield memory


@contextlib.contextmanager
def resizing(memory: StorageEvents) -> Iterator[None]:
    """Also notes storages that are resized, as those of gathered weights are: no operator is called for that."""
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        if storage._cdata in memory.alive:
            memory.add(Event(storage._cdata, size - memory.alive[storage._cdata], "resize"))
            memory.alive[storage._cdata] = size

    torch.UntypedStorage.resize_ = noted
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def fake(model: TransformerLM) -> TransformerLM:
    """A model without memory (`meta`), on which drawing weights is possible, of fake tensors on the CPU."""
    model = model.to_empty(device="cpu")
    if model.config.tie_embeddings:  # `to_empty` has made two of one
        model.lm_head.weight = model.token_embeddings.weight
    model._check = lambda token_ids: None  # fake ones have no values
    return model


class FakeWorkload(Workload):
    """A case before its step, with the optimizer's state, of fake tensors: to be made inside of `fake_memory`."""

    def __init__(self, config: WorkloadConfig, model: TransformerLM):
        self.config, self.device, self.fused = config, torch.device("cpu"), None
        self.model = self.forward = fake(model)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(enabled=False)
        shape = (config.batch_size, config.model.context_length)
        self.inputs, self.targets = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
        if config.mode == "train_step":
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            self.optimizer.step()


@functools.cache
def _peak(config: WorkloadConfig) -> dict[str, Any]:
    model = TransformerLM(config.model, device="meta")
    with fake_memory() as memory:
        work = FakeWorkload(config, model)
        work.optimizer.zero_grad(set_to_none=True)
        standing = storages_of(work)
        memory.events.clear()
        held = work.step(memory.span)
        history = memory.history("fake tensors", standing.values())
        del held
    history = explained(history, [(0, standing), (len(history.seconds) - 1, storages_of(work))])
    said, total = summary(history), levels(history).sum(axis=1)
    first, peak = history.stages[said["peak_stage"]][0], said["peak_event"]
    made = history.allocations[history.allocations["first"].between(first + 1, peak)].set_index("first")["source"]
    close = total[made.index] - total[0] >= 0.999 * (total[peak] - total[0])  # what comes after it at most adds scalars
    return {
        **{KEYS.get(category, category): size for category, size in said["peak_by_category"].items()},
        "peak_bytes": said["peak_bytes"],
        "stage": said["peak_stage"],
        "moment": made[close].iloc[0],
        "by_stage": {stage["name"]: stage["peak_bytes"] for stage in said["stages"]},
    }
