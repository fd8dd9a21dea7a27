"""Predicted memory of a forward pass and of a training step: the step itself, run on tensors without memory.

Fake tensors have shapes and types but no values: a step of any size runs in seconds on any machine. The lives of their
storages give the same history as an allocator's, in the bytes that tensors ask for (`torch.cuda.max_memory_allocated`
rounds each up to 512, which matters only for toy sizes).

Not predicted: the workspace of cuBLAS, once for each thread (32 MiB on Hopper, 8.125 MiB before;
`parseChosenWorkspaceSize` in PyTorch's aten/src/ATen/cuda/CublasHandlePool.cpp), of which the backward pass has its
own; scratch memory inside a kernel; compiled models, which fuse operations; the explicit step, whose kernels do not run
on fake tensors.
"""

from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcore.config import ModelConfig
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer
from lmcore.profiling.cases import WorkloadConfig
from lmcore.profiling.memory.profile import explained_step, owned_by
from lmcore.profiling.workload import Workload

KEYS = {"optimizer state": "optimizer_state", "other": "inputs"}
"""What `predicted_peak` calls categories."""


def predicted_peak(
    config: ModelConfig, batch_size: int = 1, precision: str = "fp32", mode: str = "train_step"
) -> dict[str, Any]:
    """The moment at which most memory is allocated, after warm-up, and what is alive then, in bytes.

    `mode` is that of `lmcore.profiling.cases.WorkloadConfig`. Keys: parameters, gradients, optimizer_state,
    activations (saved for the backward pass), temporary, inputs (token ids and position tables), peak_bytes (their
    sum), stage ("forward", "loss", "backward" or "optimizer") and by_stage, the peak of each stage. Raises `UserError`
    for unknown modes or precisions and sizes below 1.
    """
    case = WorkloadConfig(model=config, batch_size=batch_size, mode=mode, precision=precision)
    model = TransformerLM(config, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        work = FakeWorkload(case, model)
        found, _ = explained_step(work.step, work.device, partial(owned_by, work))
    return {
        **{KEYS.get(category, category): size for category, size in found["peak_by_category"].items()},
        "peak_bytes": found["peak_bytes"],
        "stage": found["peak_stage"],
        "by_stage": {stage["name"]: stage["peak_bytes"] for stage in found["stages"]},
    }


def fake(model: TransformerLM) -> TransformerLM:
    """A model without memory (`meta`), on which drawing weights is possible, of fake tensors on the CPU."""
    model = model.to_empty(device="cpu")
    if model.config.tie_embeddings:  # `to_empty` has made two of one
        model.lm_head.weight = model.token_embeddings.weight
    model._check = lambda token_ids: None  # fake ones have no values
    return model


class FakeWorkload(Workload):
    """A case before its step, with the optimizer's state, of fake tensors: to be made in a `FakeTensorMode`."""

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
            self.optimizer.zero_grad(set_to_none=True)
