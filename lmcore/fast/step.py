"""A whole training step, forward, backward, clipping and update, as one launch: on CUDA a graph of all its kernels."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lmcore.alone import Alone
from lmcore.config import OptimizerConfig, TrainConfig
from lmcore.distributed.ddp import broadcast_state
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.errors import require
from lmcore.fast.kernels.adamw import FusedAdamW
from lmcore.fast.model import FusedTransformer
from lmcore.fast.muon import FusedMuon
from lmcore.fast.sharding import Exchange, Shards, owners_by_layer
from lmcore.fast.streams import HIGH
from lmcore.fast.support import unsupported_reason
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW, Muon, build_optimizer, set_learning_rate
from lmcore.run import RunFolder
from lmcore.step import teacher_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
"""What the fused step computes in, by precision; its master weights are float32 in any case."""


def fused_optimizer(
    model: TransformerLM, config: OptimizerConfig, max_grad_norm: float | None, owners: dict[Tensor, int] | None = None
) -> Optimizer:
    """The configured optimizer, AdamW or Muon, as a graph can hold it; with `owners` a `ShardedOptimizer`."""

    def make(groups: list[dict], kind: type, **settings: Any) -> Optimizer:
        fused = partial({AdamW: FusedAdamW, Muon: FusedMuon}[kind], max_grad_norm=max_grad_norm)
        if owners is None:
            return fused(groups, **settings)
        return ShardedOptimizer(groups, fused, owners=owners, **settings)

    return build_optimizer(model, config, make)


class FusedStep:
    """Updates `model` by one batch of (batch_size, context_length) token ids per call, computing in `dtype`.

    The parameters are the float32 masters. On CUDA the first call captures the step in a CUDA graph, which further
    calls replay: clipping and update by `FusedAdamW` or `FusedMuon`, too.

    With `ranks`, the number of processes of the default group, each takes a part of the batch; gradients are averaged
    while the backward pass continues. With a `ShardedOptimizer` of `FusedAdamW` each gradient goes to its owner alone,
    which sends the updated compute weight back (`sharding.Exchange`); `current` brings the float32 parameters up to
    date, on all ranks at once. With a strategy that has `fsdp` a rank has its rows of each matrix (`sharding.Shards`).

    Raises `UserError` for a model or a `dtype` that is not covered, an empty batch, and another optimizer.
    """

    scaler = torch.amp.GradScaler(enabled=False)
    """No loss scaling: bfloat16 has the exponents of float32."""

    def __init__(
        self,
        model: TransformerLM,
        optimizer: Optimizer,
        batch_size: int,
        context_length: int,
        dtype: torch.dtype = torch.bfloat16,
        ranks: int = 0,
        strategy: Alone | None = None,
    ):
        require(min(batch_size, context_length) > 0, f"A batch of {batch_size} x {context_length} ids holds none.")
        divided = hasattr(strategy, "fsdp")
        self.transformer = FusedTransformer(model, dtype, ranks if divided else 0)
        self.optimizer, self.ranks = optimizer, ranks
        self.strategy = strategy or Alone(model)
        self.parameters = list(self.transformer.gradients)
        self.versions = self._versions()
        self.shape = torch.Size((batch_size, context_length))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        self.adamw: FusedAdamW = self.sharded.local if self.sharded is not None else optimizer
        kind = type(self.adamw).__name__
        require(isinstance(self.adamw, FusedAdamW), f"The fused step needs a FusedAdamW on every rank, not {kind}.")
        self.exchange: Exchange | Shards | None = None  # of gradients and weights that are divided
        if self.sharded is not None:
            self.exchange = Exchange(self.transformer, self.sharded)
        elif divided:
            self.exchange = Shards(self.transformer, ranks)
        self.behind = False  # float32 parameters that other ranks have updated
        self.adamw.bind(self.transformer.gradients, self.transformer.compute_weights)
        if self.transformer.device.type == "cuda":
            self.batch = torch.zeros(2, *self.shape, dtype=torch.int64, device=self.transformer.device)

    @staticmethod
    def uncovered(config: TrainConfig, ranks: int) -> str | None:
        """What of a configuration this step does not cover; None: nothing."""
        strategy, optimizer = config.strategy if ranks > 1 else "none", config.optimizer.name
        if config.z_loss:
            return f"z_loss={config.z_loss}"
        if optimizer == "sgd":
            return "optimizer=sgd"
        reason = unsupported_reason(config.model, config.precision, ranks if strategy == "fsdp" else 0)
        if strategy in ("zero1", "fsdp") and optimizer != "adamw":
            return reason or f"strategy={strategy} with {optimizer}"
        if reason is None and config.teacher is not None:
            lacking = unsupported_reason(RunFolder(config.teacher).config().model, config.precision)
            reason = lacking and f"a teacher with {lacking}"
        return reason or (None if strategy in ("none", "ddp", "zero1", "fsdp") else f"strategy={strategy}")

    @classmethod
    def from_config(cls, model: TransformerLM, config: TrainConfig, ranks: int = 1) -> "FusedStep":
        """This rank's step of a training run, with the run's optimizer; see `lmcore.step.training_step`."""
        ranks, strategy = ranks if ranks > 1 else 0, None
        if ranks:
            from lmcore.distributed.strategies import Divided, OurFSDP  # whose DTensors take seconds to import

            strategy = (OurFSDP if config.strategy == "fsdp" else Divided)(model, config)
            if config.strategy != "fsdp":
                broadcast_state(model)
        limit = config.optimizer.max_grad_norm or math.inf  # without a limit the norm is measured all the same
        owners = owners_by_layer(model, ranks) if ranks and config.strategy == "zero1" else None
        optimizer = fused_optimizer(model, config.optimizer, limit, owners)
        context, dtype = config.model.context_length, DTYPES[config.precision]
        rows = config.batch_size // max(1, ranks)
        step = cls(model, optimizer, rows, context, dtype, ranks, strategy)
        if (teacher := teacher_of(config, step.transformer.device)) is not None:
            step.transformer.teacher = FusedTransformer.predictor(teacher, dtype)
            step.transformer.teacher_share = config.teacher_share
        return step

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, lr: float | None = None) -> tuple[Tensor, Tensor]:
        """Takes a step; returns the loss (nats) and the gradients' norm before clipping, scalars on the device.

        `lr` is the learning rate; None leaves the optimizer's own. Raises `UserError` for a batch of another shape,
        and `torch.OutOfMemoryError` if the step does not fit.
        """
        if lr is not None:
            set_learning_rate(self.optimizer, lr)
        for shape in (inputs.shape, targets.shape):
            require(shape == self.shape, f"This step takes batches of {tuple(self.shape)} ids, not {tuple(shape)}.")
        self._notice_writes()
        if self.transformer.device.type != "cuda":
            return self._eager(inputs, targets)
        self.batch[0].copy_(inputs, non_blocking=True)
        self.batch[1].copy_(targets, non_blocking=True)
        if self.graph is None:
            self._capture()
        self._prepare()
        self.graph.replay()
        self.behind = self.sharded is not None
        loss, norm = self.result.clone().unbind()  # the next replay writes over the graph's own
        return loss, norm

    def current(self) -> tuple[TransformerLM, Optimizer]:
        """The model and the optimizer as the last step leaves them.

        With a `ShardedOptimizer` every rank calls it at the same point, as owners send the parameters they updated.
        Weights and moments may be written, too, as from a checkpoint: the next call notices what autograd counts.
        """
        if self.behind:
            self.sharded.send({p: p.data for p in self.parameters})
            self.behind = False
        return self.transformer.model, self.optimizer

    def release(self) -> None:
        """Gives the graph up: NCCL ends only when no graph that has captured it is left. Ranks may call it alone."""
        if self.graph is not None:
            self.graph.reset()
            self.graph = None

    def evaluation_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss (nats) of a batch of any shape with the weights of `current`, which it calls; on the device."""
        self.current()
        self._notice_writes()
        return self.transformer.loss(inputs, targets)

    def _prepare(self) -> None:
        if self.sharded is not None:
            self.sharded.follow()
        self.adamw.prepare()

    def _measure(self) -> None:
        """The norm of all gradients; where they are divided, each rank measures its own, and the squares are summed."""
        self.adamw.measure()
        if self.exchange is not None:
            square = self.adamw.norm.square()
            if self.sharded is None:
                square -= self.exchange.counted_again()
            dist.all_reduce(square)
            self.adamw.norm.copy_(square.sqrt())

    def _apply(self) -> None:
        """The update; of a sharded one everybody gets the weights that the next step computes with.

        Of divided matrices the next pass gathers what it needs.
        """
        self.adamw.apply()
        if self.sharded is not None:
            self.exchange.gather()

    def _notice_writes(self) -> None:
        """After a write from outside: copies the parameters again."""
        if self.versions != self._versions():
            self.transformer.refresh()
            self.versions = self._versions()

    def _versions(self) -> list[int]:
        """How often each parameter has been written, by autograd's count, which kernels of our own leave alone."""
        return [p._version for p in self.parameters]

    @torch.no_grad()
    def _eager(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The step without a graph."""
        loss = self._gradients(inputs, targets)
        self._prepare()
        self._measure()
        self._apply()
        self.behind, self.versions = self.sharded is not None, self._versions()
        return loss, self.adamw.norm.clone()

    def _gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass; of several ranks, what is finished begins to be summed beside it."""
        if not self.ranks:
            return self.transformer.forward_backward(inputs, targets)
        sums, left = [], {0, *self.transformer.parts.values()}
        average = dist.get_backend() == "nccl"  # gloo only sums
        how = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM

        def finished(parts: Collection[int]) -> None:
            left.difference_update(parts)
            if self.exchange is None:
                for gradient in self.transformer.packed_gradients(parts):
                    sums.append((dist.all_reduce(gradient, how, async_op=True), gradient))
                return
            sums.extend(self.exchange.reduce(parts, how))

        loss = self.transformer.forward_backward(inputs, targets, finished)
        finished(set(left))
        for work, _ in sums:
            work.wait()
        if not average:
            torch._foreach_div_([gradient for _, gradient in sums], self.ranks)
        return loss

    def _launches(self) -> None:
        """What the graph holds; leaves (loss, norm) in `result`."""
        loss = self._gradients(*self.batch)
        self._measure()
        self._apply()
        self.result = torch.stack((loss.float(), self.adamw.norm))

    def _capture(self) -> None:
        """Records the graph. Kernels are compiled before, by passes that write nothing but gradients."""
        device = self.transformer.device
        stream = torch.cuda.Stream(device, priority=HIGH)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            drawn = torch.cuda.get_rng_state(device)  # dropout's draws here are not the run's
            for _ in range(2):  # memory that the first pass allocates in bits, the second finds in place
                self.transformer.forward_backward(*self.batch)
            torch.cuda.set_rng_state(drawn, device)
            self.adamw.warm_up()
        graph = torch.cuda.CUDAGraph()
        try:
            # relaxed: other threads may go on allocating, as one that prefetches batches does
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                self._launches()
        except RuntimeError as error:  # ending a capture that ran out of memory fails as well, and hides why
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        torch.cuda.synchronize(device)  # the capture's stream has dropout's offset to write, which replays read
        self.graph = graph
        self.versions = self._versions()  # without Triton the captured update counts as a write
