"""One training step: forward, backward, clip, update (CSE599-O A1 section 5.3); and the names that lead to others."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmcore.alone import Alone
from lmcore.checkpoint import load_model
from lmcore.config import TrainConfig, named
from lmcore.device import autocast
from lmcore.errors import UserError
from lmcore.functional import cross_entropy, soft_cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import set_learning_rate

STRATEGIES = "lmcore.distributed.strategies:STRATEGIES"
"""How several ranks divide the work, by the name of `TrainConfig.strategy`; one rank is `Alone`."""


def teacher_of(config: TrainConfig, device: torch.device) -> TransformerLM | None:
    """The model whose predictions a run learns, in evaluation mode; None where it has no teacher."""
    from lmcore.run import RunFolder  # with pandas, which the doctor does without

    if config.teacher is None:
        return None
    with torch.random.fork_rng(devices=[]):  # numbers drawn here are not the run's
        return load_model(RunFolder(config.teacher).best_weights, device)


class PlainStep:
    """One batch, one update, with PyTorch's operations and autograd, compiled if so configured."""

    def __init__(self, model: TransformerLM, config: TrainConfig, device: torch.device, strategy: Alone | None = None):
        self.model, self.config, self.device = model, config, device
        self.strategy = strategy or Alone(model, config)  # how the ranks divide the work
        self.optimizer = self.strategy.optimizer()
        self.teacher = teacher_of(config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        if config.compile:
            torch.compiler.reset()  # a sweep's runs share a process, and PyTorch limits recompilations of one function
        self.loss_function = torch.compile(self.loss, dynamic=False) if config.compile else self.loss

    @classmethod
    def from_config(cls, model: TransformerLM, config: TrainConfig, ranks: int = 1) -> "PlainStep":
        """The step of a training run on one of `ranks` processes."""
        strategy = named(STRATEGIES)[config.strategy] if ranks > 1 else Alone
        return cls(model, config, model.lm_head.weight.device, strategy(model, config))

    @staticmethod
    def uncovered(config: TrainConfig, ranks: int) -> str | None:
        """What of a configuration this step does not cover; None: nothing."""
        lacking = {"model.checkpoint_every": config.model.checkpoint_every is not None, "compile": config.compile}
        divided = ranks > 1 and config.strategy == "fsdp"
        return ", ".join(name for name, asked in lacking.items() if asked and divided) or None

    def loss(self, inputs: Tensor, targets: Tensor, learns: bool = False) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats per token of (batch, context) ids, and what is minimized where the model `learns`;
        nothing is compiled."""
        with autocast(self.device, self.config.precision):
            logits = self.strategy.module(inputs)
            loss = objective = cross_entropy(logits, targets)
            if learns and self.teacher is not None:
                with torch.no_grad():
                    predicted = self.teacher(inputs)
                objective = torch.lerp(loss, soft_cross_entropy(logits, predicted), self.config.teacher_share)
        if learns and self.config.z_loss:
            objective = objective + self.config.z_loss * logits.float().logsumexp(-1).square().mean()
        return loss, objective

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float | None = None) -> tuple[Tensor, Tensor]:
        """Updates the weights by one batch; loss and gradient norm before clipping stay on the device."""
        if lr is not None:
            set_learning_rate(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)  # first: old gradients need no room beside activations
        loss, objective = self.loss_function(inputs, targets, learns=True)  # forward
        self.scaler.scale(objective).backward()  # backward
        self.strategy.finish()  # gradients: averages over the ranks
        self.scaler.unscale_(self.optimizer)
        norm = self.strategy.clip()  # clip
        self.scaler.step(self.optimizer)  # update
        self.scaler.update()
        return (loss + 0 * objective).detach(), norm  # not finite either where only a teacher's part is not

    def evaluation_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss alone; a smaller last batch is not compiled for."""
        usual = len(inputs) == self.config.eval_batch_size
        return (self.loss_function if usual else self.loss)(inputs, targets)[0]

    def current(self) -> tuple[TransformerLM, Optimizer]:
        """Model and optimizer as the last step leaves them; see `FusedStep.current`, where that takes work."""
        return self.model, self.optimizer

    def release(self) -> None:
        """Nothing to give up; see `FusedStep.release`."""


STEPS: dict[str, Any] = {"plain": PlainStep, "fused": "lmcore.fast.step:FusedStep"}
"""By the name of `TrainConfig.ops`: a class, or the path to one that only those import who ask for it."""


def training_step(model: TransformerLM, config: TrainConfig, ranks: int = 1) -> tuple[Any, str | None]:
    """The configured step of `model` on one of `ranks` processes: a `PlainStep`, or what is called like one.

    Where it does not cover the configuration, it is the plain one, and the second value says why. Raises `UserError`
    if that does not cover it either.
    """
    reasons = []
    for kind in (named(STEPS[config.ops]), PlainStep):
        if (reason := kind.uncovered(config, ranks)) is None:
            return kind.from_config(model, config, ranks), (reasons or [None])[0]
        reasons.append(reason)
    raise UserError(
        f"strategy={config.strategy} does not cover {reasons[1]}: only the fused step does, and it does not cover "
        f"{reasons[0]}."
    )
