"""What one batch does to the weights: the plain step by autograd, or the fused one where it covers the model."""

import math
from functools import partial

import torch
from torch import Tensor

from lmcore.config import TrainConfig
from lmcore.device import autocast
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import build_optimizer, gradient_clipping

FUSED_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
"""What the fused step computes in, by precision; its master weights are float32 in any case."""


class PlainStep:
    """Forward, backward, clipping and update with PyTorch's operations (section 5.3), compiled if so configured."""

    def __init__(self, model: TransformerLM, config: TrainConfig, device: torch.device):
        self.model, self.device = model, device
        self.optimizer = build_optimizer(model, config.optimizer)
        self.precision = config.precision
        self.max_grad_norm = config.optimizer.max_grad_norm or math.inf
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        if config.compile:
            torch.compiler.reset()  # a sweep's runs share a process, and PyTorch limits recompilations of one function
        self.loss_function = torch.compile(self.loss, dynamic=False) if config.compile else self.loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of (batch, context) ids; nothing is compiled."""
        with autocast(self.device, self.precision):
            return cross_entropy(self.model(inputs), targets)

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the weights by one batch; loss and gradient norm before clipping stay on the device."""
        loss = self.loss_function(inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = gradient_clipping(self.model.parameters(), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), norm

    def evaluation_loss(self, inputs: Tensor, targets: Tensor, usual_shape: bool) -> Tensor:
        """The loss alone; a batch of an unusual shape would be compiled again."""
        return (self.loss_function if usual_shape else self.loss)(inputs, targets)

    def finish(self) -> None:
        """To be called before anything reads the weights or the optimizer's state: they are current here."""

    def weights_changed(self) -> None:
        """To be called when something else has written weights or optimizer state: nothing depends on them here."""


class FusedTrainingStep:
    """The same by the explicit step of `lmcore.fused`: on CUDA one graph, with weights in the configured precision.

    The model's own parameters stay the float32 masters, and are current after `finish`.
    """

    def __init__(self, model: TransformerLM, config: TrainConfig):
        from lmcore.fused.step import FusedStep
        from lmcore.kernels.adamw import FusedAdamW

        limit = config.optimizer.max_grad_norm or math.inf  # without a limit the norm is measured all the same
        self.optimizer = build_optimizer(model, config.optimizer, partial(FusedAdamW, max_grad_norm=limit))
        self.scaler = torch.amp.GradScaler(enabled=False)
        dtype = FUSED_DTYPES[config.precision]
        context = config.model.context_length
        self.step = FusedStep(model, self.optimizer, config.batch_size, context, dtype, max_grad_norm=limit)

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the weights by one batch; loss and gradient norm before clipping stay on the device."""
        return self.step(inputs, targets)

    def evaluation_loss(self, inputs: Tensor, targets: Tensor, usual_shape: bool) -> Tensor:
        """The loss alone, in chunks of logits."""
        self.finish()
        return self.step.model.loss(inputs, targets)

    def finish(self) -> None:
        """To be called before anything reads the weights or the optimizer's state: takes the update that is due."""
        self.step.finish()

    def weights_changed(self) -> None:
        """To be called when something else has written weights or optimizer state; drops an update that is due."""
        self.step.weights_changed()


def training_step(
    model: TransformerLM, config: TrainConfig, device: torch.device
) -> tuple[PlainStep | FusedTrainingStep, str | None]:
    """The configured step of `model`; and, if the fused one was asked for but does not cover it, why not."""
    if config.ops == "plain":
        return PlainStep(model, config, device), None
    from lmcore.fused.coverage import why_not

    reason = why_not(config.model, config.precision)
    return (FusedTrainingStep(model, config) if reason is None else PlainStep(model, config, device)), reason
