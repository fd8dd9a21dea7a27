"""Predicted memory of a forward pass and of a training step: the step itself, run on tensors without memory.

Fake tensors (PyTorch's `meta` tensors, which know the device that they stand for) have shapes and types but no values:
a step of any size runs in seconds on any machine. Each storage is noted when it appears and when nothing holds it any
more, which gives the same history as an allocator's, in the bytes that tensors ask for
(`torch.cuda.max_memory_allocated` rounds each up to 512, which matters only for toy sizes).

Not predicted: the workspace of cuBLAS, which PyTorch takes from the same allocator once a thread, and the backward pass
has a thread of its own (32 MiB on Hopper, 8.125 MiB before; `parseChosenWorkspaceSize` in PyTorch's
aten/src/ATen/cuda/CublasHandlePool.cpp); scratch memory inside a kernel; compiled models, which fuse operations.
"""

import functools
import re
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcore.config import ModelConfig
from lmcore.errors import require, require_positive
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer
from lmcore.profiling.memory.profile import standing_storages
from lmcore.profiling.memory.recording import StorageRecorder, storage_address
from lmcore.profiling.memory.timeline import CATEGORIES, bytes_by_state, explained, stage_at
from lmcore.profiling.workload import Workload, WorkloadConfig

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PASSES = ("forward", "forward_backward", "train_step")


def residual_stream_bytes(
    config: ModelConfig, batch_size: int = 1, seq_len: int | None = None, bytes_per_value: int = 4
) -> int:
    """Bytes of one tensor of the residual stream, (batch_size, seq_len, d_model) (memory_profiling d)."""
    return bytes_per_value * batch_size * (seq_len or config.context_length) * config.d_model


def predicted_peak(
    config: ModelConfig,
    batch_size: int = 1,
    seq_len: int | None = None,
    precision: str = "fp32",
    passes: str = "train_step",
) -> dict[str, Any]:
    """The moment at which most memory is allocated, after warm-up, and what is alive then, in bytes.

    `passes` are those of `lmcore.profiling.workload.WorkloadConfig`. Keys: parameters, gradients, optimizer_state,
    activations (kept for the backward pass), temporary, inputs (token ids and position tables), peak_bytes (their
    sum), stage ("forward", "loss", "backward" or "optimizer") and moment (function and operator, or the node of the
    backward pass) of the allocation that first comes within a thousandth of it, and by_stage, the peak of each stage.
    Raises `UserError` for unknown passes or precisions, sizes below 1, and more tokens than the context.
    """
    seq_len = config.context_length if seq_len is None else seq_len
    require(precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}.")
    require(passes in PASSES, f"passes must be one of {', '.join(PASSES)}, not {passes!r}.")
    require_positive("batch_size", batch_size)
    require_positive("seq_len", seq_len)
    require(
        seq_len <= config.context_length,
        f"seq_len ({seq_len}) is above the model's context_length ({config.context_length}).",
    )
    found = _peak(WorkloadConfig(config, batch_size, passes, precision), seq_len)
    return found | {"by_stage": dict(found["by_stage"])}


class FakeModel(TransformerLM):
    """The model without a look at the token ids: fake ones have no values."""

    def _check(self, token_ids: Tensor) -> None:
        pass


class FakeWorkload(Workload):
    """A cell before its step, with the optimizer's state, of fake tensors: to be made in a `FakeTensorMode`."""

    def __init__(self, config: WorkloadConfig, model: TransformerLM, seq_len: int):
        self.config, self.device, self.fused = config, torch.device("cpu"), None
        self.model = self.forward = model.to_empty(device=self.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(enabled=False)
        self.inputs, self.targets = (torch.empty(config.batch_size, seq_len, dtype=torch.int64) for _ in range(2))
        if config.passes == "train_step":
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            self.optimizer.step()


@functools.cache
def _peak(config: WorkloadConfig, seq_len: int) -> dict[str, Any]:
    model = FakeModel(config.model, device="meta")  # drawing weights looks at them, where they are not on `meta`
    with FakeTensorMode(allow_non_fake_inputs=True):
        work = FakeWorkload(config, model, seq_len)
        work.optimizer.zero_grad(set_to_none=True)
        standing = standing_storages(work)
        with StorageRecorder(standing) as recorder:
            held = work.step(recorder.span)
            recorded = recorder.history
        del held
        named = work.model.named_parameters()
        gradients = {storage_address(p.grad): name for name, p in named if p.grad is not None}
    history = explained(recorded, standing, gradients, {})
    by_category = bytes_by_state(history, CATEGORIES)
    total = by_category.sum(axis=0)
    added = total - total[0]
    peak, near = int(added.argmax()), int((added >= 0.999 * added.max()).argmax())
    parts = dict(zip(CATEGORIES, by_category[:, peak].tolist(), strict=True))
    source = next(a.source for a in recorded.allocations if a.first == near)
    return {
        "parameters": parts["parameters"],
        "optimizer_state": parts["optimizer state"],
        "inputs": parts["other"],
        "gradients": parts["gradients"],
        "activations": parts["activations"],
        "temporary": parts["temporary"],
        "peak_bytes": int(total[peak]),
        "stage": stage_at(history, near),
        "moment": re.sub(r"^lmcore/\S+ ", "", source),
        "by_stage": {s.name: int(total[s.first : s.last + 1].max()) for s in history.stages},
    }
