"""What a benchmark case runs: a model, a random batch, and how much of a training step (CS336 A2 section 1.1.3)."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from lmcore.accounting import least_step_bytes, num_parameters
from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig, from_dict, model_config, replace, require_choices
from lmcore.device import autocast, select_device, set_matmul_precision, too_large
from lmcore.errors import require, require_positive, require_seed
from lmcore.functional import cross_entropy
from lmcore.fused.coverage import why_not
from lmcore.fused.step import FusedStep
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer

Span = Callable[[str], AbstractContextManager]
"""Makes the context that a named part of a step runs in: a timer, a profiler's range, or nothing."""

PHASES = ("forward", "loss", "backward", "optimizer")
"""Names that `Workload.step` gives to its parts, in order."""


def no_span(name: str) -> AbstractContextManager:
    """The span that does nothing."""
    return contextlib.nullcontext()


PASSES = {
    "forward": "A forward pass",
    "forward_backward": "A forward and backward pass",
    "train_step": "A training step",
}
"""What the passes of a benchmark case are called in a sentence."""


@dataclass(frozen=True)
class WorkloadConfig:
    """One benchmark case: what is run, in which precision, and how often."""

    model: ModelConfig = field(default_factory=lambda: model_config("small"))
    batch_size: int = 4
    passes: Literal["forward", "forward_backward", "train_step"] = "forward"
    """forward: inference, nothing kept for a backward pass; forward_backward: with loss and gradients; train_step: and
    the optimizer's update."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """fp32, the same with TF32 matmuls, or mixed precision by autocast; fp16 with loss scaling."""
    ops: Literal["plain", "fused"] = "plain"
    """plain: the model as it is; fused: our kernels in an explicit step, where they cover the model. That has
    FlashAttention and compiles nothing, whatever the model's `attention` and `compile` are."""
    compile: bool = False
    warmup_steps: int = 5
    steps: int = 10
    """Measured steps, after the warm-up."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its learning rate is used as it is, without a schedule, and gradients are not clipped."""
    seed: int = 0
    device: str = "auto"
    size: str | None = None
    """Name of the model's size, for tables."""

    def __post_init__(self):
        require_positive("batch_size", self.batch_size)
        require_positive("steps", self.steps)
        whole = isinstance(self.warmup_steps, int) and not isinstance(self.warmup_steps, bool)
        require(
            whole and self.warmup_steps >= 0,
            f"warmup_steps must be a whole number, 0 or more, not {self.warmup_steps!r}.",
        )
        require_seed(self.seed)
        require_choices(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step goes through."""
        return self.batch_size * self.model.context_length


def workload_config(
    size: str = "small", context_length: int = 256, vocab_size: int = 10_000, **changes: Any
) -> WorkloadConfig:
    """The case of a named size (CS336 A2 Table 1: vocabulary 10,000, batch 4); `changes` go to the model or the case.

    Raises `UserError` on unknown sizes and fields.
    """
    switches = {f.name: changes.pop(f.name) for f in fields(ModelConfig) if f.name in changes}
    model = model_config(size, context_length=context_length, vocab_size=vocab_size, **switches)
    return from_dict(WorkloadConfig, {"model": model, "size": size} | changes)


def case_grid(
    sizes: Sequence[str],
    contexts: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    passes: Sequence[str] = tuple(PASSES),
    **changes: Any,
) -> dict[str, WorkloadConfig]:
    """Every combination, by names such as small-256-fp32-train_step; `changes` go to the model or the case.

    Grids of one kind can be joined (`|`): a case that is in both has one name. Raises `UserError` as
    `workload_config` does.
    """
    return {
        f"{size}-{context}-{precision}-{how_far}": workload_config(
            size, context, precision=precision, passes=how_far, **changes
        )
        for context, size, precision, how_far in itertools.product(contexts, sizes, precisions, passes)
    }


def fused_step(model: TransformerLM, config: WorkloadConfig) -> FusedStep:
    """The fused training step of a case. Raises `UserError` where it does not cover the case: that would be measured
    as something else."""
    reason = why_not(config.model, config.precision)
    require(reason is None, f"The fused step does not cover {reason}; measure this case with ops plain.")
    settings = replace(config.optimizer, max_grad_norm=None)
    shape = {"batch_size": config.batch_size, "precision": config.precision}
    return FusedStep.from_config(model, TrainConfig(model=config.model, optimizer=settings, **shape))


def require_memory(config: WorkloadConfig, device: torch.device) -> None:
    """Raises MemoryError if, by arithmetic alone, the passes of a case cannot fit into the device's memory."""
    least = least_step_bytes(
        config.model, config.batch_size, config.passes, config.precision, config.optimizer.name,
        steps=config.warmup_steps + config.steps, saves_all=config.ops == "plain" and not config.compile,
    )  # fmt: skip
    parameters = num_parameters(config.model)
    if (reason := too_large(PASSES[config.passes], least, parameters, config.batch_size, device)) is not None:
        raise MemoryError(reason)


class Workload:
    """The model, batch and optimizer of a case, on its device, and one step of its passes.

    Weights are drawn on the device and kept in float32; tokens are random, as only time and memory are measured.
    Raises `UserError` for a device that is not there; a lack of memory comes out as PyTorch's own error, or as
    MemoryError, before anything is built, where the arithmetic of `lmcore.accounting` says so.
    """

    def __init__(self, config: WorkloadConfig):
        self.config = config
        self.device, _ = select_device(config.device)
        require_memory(config, self.device)
        set_matmul_precision(self.device, config.precision)
        torch.manual_seed(config.seed)
        self.model = TransformerLM(config.model, device=self.device)
        self.fused = fused_step(self.model, config) if config.ops == "fused" else None
        self.forward = torch.compile(self.model, dynamic=False) if config.compile else self.model
        self.optimizer = build_optimizer(self.model, config.optimizer) if self.fused is None else self.fused.optimizer
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
        passes = self.config.passes
        if self.fused is not None:
            if passes == "forward":
                return self.fused.transformer.loss(self.inputs, self.targets)
            if passes == "forward_backward":
                return self.fused.transformer.forward_backward(self.inputs, self.targets)
            return self.fused(self.inputs, self.targets)[0]
        if passes == "forward":
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
        if passes == "train_step":
            with span("optimizer"):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return loss.detach()

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
