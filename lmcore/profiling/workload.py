"""What a benchmark case runs: a model, a random batch, and how much of a training step (CS336 A2 section 1.1.3)."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lmcore.accounting import num_parameters
from lmcore.config import TrainConfig, replace
from lmcore.device import autocast, select_device, set_matmul_precision, too_large
from lmcore.errors import require
from lmcore.fast.step import FusedStep
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer
from lmcore.profiling.cases import MODES, WorkloadConfig
from lmcore.profiling.plausible import least_bytes

Span = Callable[[str], AbstractContextManager]
"""Makes the context that a named part of a step runs in: a timer, a profiler's range, or nothing."""

Step = Callable[[Span], Any]
"""A step of whatever work: it calls the span for its parts, if it names any."""

PHASES = ("forward", "loss", "backward", "optimizer")
"""Names that `Workload.step` gives to its parts, in order."""


def no_span(name: str) -> AbstractContextManager:
    """The span that does nothing."""
    return contextlib.nullcontext()


class Workload:
    """The model, batch and optimizer of a case, on its device, and one step of its passes.

    Weights are drawn on the device and kept in float32; tokens are random, as only time and memory are measured.
    Raises `UserError` for a device that is not there and where the fused step does not cover the case, which would be
    measured as something else; a lack of memory comes out as PyTorch's own error, or as MemoryError, before anything
    is built, where the arithmetic of `lmcore.accounting` says so.
    """

    def __init__(self, config: WorkloadConfig):
        self.config, self.fused = config, None
        self.device, _ = select_device(config.device)
        least, parameters = least_bytes(config), num_parameters(config.model)
        if (reason := too_large(MODES[config.mode], least, parameters, config.batch_size, self.device)) is not None:
            raise MemoryError(reason)
        set_matmul_precision(self.device, config.precision)
        torch.manual_seed(config.seed)
        self.model = TransformerLM(config.model, device=self.device)
        self.forward = torch.compile(self.model, dynamic=False) if config.compile else self.model
        if config.ops == "fused":
            settings = replace(config.optimizer, max_grad_norm=None)
            run = TrainConfig(config.model, settings, batch_size=config.batch_size, precision=config.precision)
            reason = FusedStep.uncovered(run, 1)
            require(reason is None, f"The fused step does not cover {reason}; measure this case with ops plain.")
            self.fused = FusedStep.from_config(self.model, run)
        self.optimizer = self.fused.optimizer if self.fused else build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        shape = (config.batch_size, config.model.context_length)
        self.inputs, self.targets = (
            torch.randint(config.model.vocab_size, shape, device=self.device) for _ in range(2)
        )

    def step(self, span: Span = no_span) -> Tensor:
        """One step of the passes; its parts run inside `span("forward")`, `span("loss")`, … (see `PHASES`).

        Returns the logits of a forward pass, (batch, context, vocab), else the loss. Old gradients are dropped first.
        A fused step has no parts and no logits: its forward pass ends in the loss, too.
        """
        mode = self.config.mode
        if self.fused is not None:
            if mode == "train_step":
                return self.fused(self.inputs, self.targets)[0]
            transformer = self.fused.transformer
            return (transformer.loss if mode == "forward" else transformer.forward_backward)(self.inputs, self.targets)
        if mode == "forward":
            with span("forward"), torch.no_grad(), autocast(self.device, self.config.precision):
                return self.forward(self.inputs)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            with span("forward"):
                logits = self.forward(self.inputs)
            with span("loss"):
                loss = cross_entropy(logits, self.targets)
        del logits  # as in training, where the loss function owns them: gone as soon as the backward pass is past them
        with span("backward"):
            self.scaler.scale(loss).backward()
        if mode == "train_step":
            with span("optimizer"):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return loss.detach()
