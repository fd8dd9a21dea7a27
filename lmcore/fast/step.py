"""A whole training step, forward, backward, clipping and update, as one launch: on CUDA a graph of all its kernels."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lmcore.alone import Alone
from lmcore.config import OptimizerConfig, TrainConfig
from lmcore.distributed.ddp import broadcast_state
from lmcore.distributed.sharded_optimizer import ShardedOptimizer
from lmcore.distributed.strategies import Divided, OurFSDP
from lmcore.errors import require
from lmcore.fast.kernels.adamw import FusedAdamW
from lmcore.fast.model import FusedTransformer, nothing
from lmcore.fast.muon import FusedMuon
from lmcore.fast.sharding import Exchange, Shards, owners_by_layer
from lmcore.fast.streams import HIGH, SideStream
from lmcore.fast.support import unsupported_reason
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW, Muon, build_optimizer, gradient_clipping, set_learning_rate

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
"""What the fused step computes in, by precision; its master weights are float32 in any case."""

FEW_ROWS, NARROW = 2048, 1024
"""Tokens of a batch up to which the update fits in beside the forward pass, and d_model below which it does: on the
H200 it gained at 768, and lost at 2,560, where matmuls fill the chip and only take turns with the update."""


def fused_optimizer(
    model: TransformerLM, config: OptimizerConfig, max_grad_norm: float | None, owners: dict[Tensor, int] | None = None
) -> Optimizer:
    """The configured optimizer as a graph can hold it: with `owners` a `ShardedOptimizer`; SGD is the plain one."""

    def make(groups: list[dict], kind: type, **settings: Any) -> Optimizer:
        if (fused := {AdamW: FusedAdamW, Muon: FusedMuon}.get(kind)) is None:
            return kind(groups, **settings)
        settings["max_grad_norm"] = max_grad_norm
        return ShardedOptimizer(groups, fused, owners=owners, **settings) if owners else fused(groups, **settings)

    return build_optimizer(model, config, make)


class FusedStep:
    """Updates `model` by one batch of (batch_size, context_length) token ids per call, computing in `dtype`.

    The parameters are the float32 masters. On CUDA the first call captures the step in a CUDA graph, which further
    calls replay. With `FusedAdamW` the graph holds everything, clipping included; any other optimizer finds float32
    gradients in `p.grad`, clipped to `max_grad_norm`, and takes its own step outside of the graph.

    A `pipelined` step takes its update with the next call, layer after layer beside that call's forward pass: until
    then parameters and moments are one step behind. **Read and write them through** `current`, which takes the update
    that is due. It is the default with `FusedAdamW` on CUDA for few tokens of narrow models (`FEW_ROWS`, `NARROW`).

    With `ranks`, the number of processes of the default group, each takes a part of the batch; gradients are averaged
    while the backward pass continues. With a `ShardedOptimizer` of `FusedAdamW` each gradient goes to its owner alone,
    which sends the updated compute weight back (`sharding.Exchange`); `current` brings the float32 parameters up to
    date, on all ranks at once. With the strategy `OurFSDP` a rank has its rows of each matrix (`sharding.Shards`).

    Raises `UserError` for a model or a `dtype` that is not covered, an empty batch, and a `pipelined` step with another
    optimizer than `FusedAdamW`.
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
        max_grad_norm: float | None = None,
        pipelined: bool | None = None,
        ranks: int = 0,
        strategy: Alone | None = None,
    ):
        require(min(batch_size, context_length) > 0, f"A batch of {batch_size} x {context_length} ids holds none.")
        divided = isinstance(strategy, OurFSDP)
        self.transformer = FusedTransformer(model, dtype, ranks if divided else 0)
        self.optimizer, self.max_grad_norm, self.ranks = optimizer, max_grad_norm, ranks
        self.strategy = strategy or Alone(model)
        self.parameters = list(self.transformer.gradients)
        self.versions = self._versions()
        self.shape = torch.Size((batch_size, context_length))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        updates = self.sharded.local if self.sharded is not None else optimizer
        self.adamw = updates if isinstance(updates, FusedAdamW) else None  # what the graph can hold
        self.exchange: Exchange | Shards | None = None  # of gradients and weights that are divided
        if self.sharded is not None:
            found = f"of {len(self.parameters)} parameters this one of {ranks} ranks updates none with FusedAdamW"
            require(self.adamw is not None, f"A sharded step needs a FusedAdamW on every rank; {found}.")
            self.exchange = Exchange(self.transformer, self.sharded)
        elif divided:
            self.exchange = Shards(self.transformer, ranks)
        ours = self.adamw is not None and self.adamw.by_parts and self.exchange is None
        leaves_room = self.shape.numel() <= FEW_ROWS and model.config.d_model < NARROW
        by_default = ours and leaves_room and self.transformer.device.type == "cuda"
        self.pipelined = by_default if pipelined is None else pipelined
        require(
            ours or not self.pipelined,
            f"A pipelined step needs FusedAdamW; {type(optimizer).__name__} takes its own step after each call.",
        )
        self.due = False  # an update
        self.behind = False  # float32 parameters that other ranks have updated
        if self.adamw is not None:
            self.adamw.bind(self.transformer.gradients, self.transformer.compute_weights, self.transformer.parts)
        else:
            for p, gradient in self.transformer.gradients.items():  # what is float32 already serves as it is
                p.grad = gradient if gradient.dtype == p.dtype else torch.zeros_like(p)
        if self.transformer.device.type == "cuda":
            self.batch = torch.zeros(2, *self.shape, dtype=torch.int64, device=self.transformer.device)
            self.updates = SideStream(self.transformer.device, self.pipelined)

    @staticmethod
    def uncovered(config: TrainConfig, ranks: int) -> str | None:
        """What of a configuration this step does not cover; None: nothing."""
        strategy, optimizer = config.strategy if ranks > 1 else "none", config.optimizer.name
        if config.z_loss:
            return f"z_loss={config.z_loss}"
        reason = unsupported_reason(config.model, config.precision, ranks if strategy == "fsdp" else 0)
        if strategy in ("zero1", "fsdp") and optimizer != "adamw":
            return reason or f"strategy={strategy} with {optimizer}"
        return reason or (None if strategy in ("none", "ddp", "zero1", "fsdp") else f"strategy={strategy}")

    @classmethod
    def from_config(cls, model: TransformerLM, config: TrainConfig, ranks: int = 1) -> "FusedStep":
        """This rank's step of a training run, with the run's optimizer; see `lmcore.step.training_step`."""
        ranks, strategy = (ranks, Divided(model, config)) if ranks > 1 else (0, None)
        if ranks and config.strategy == "fsdp":
            strategy = OurFSDP(model, config)
        elif ranks:
            broadcast_state(model)
        limit = config.optimizer.max_grad_norm or math.inf  # without a limit the norm is measured all the same
        owners = owners_by_layer(model, ranks) if ranks and config.strategy == "zero1" else None
        optimizer = fused_optimizer(model, config.optimizer, limit, owners)
        context, dtype = config.model.context_length, DTYPES[config.precision]
        rows = config.batch_size // max(1, ranks)
        return cls(model, optimizer, rows, context, dtype, max_grad_norm=limit, ranks=ranks, strategy=strategy)

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
        if self.adamw is None:
            self.graph.replay()
            return self.result.clone()[0], self._other_update()
        if not self.pipelined:
            self._prepare()
        elif not self.due:
            self.adamw.idle()
        self.graph.replay()
        if self.pipelined:
            self._prepare()
            self.due = True
        self.behind = self.sharded is not None
        loss, norm = self.result.clone().unbind()  # the next replay writes over the graph's own
        return loss, norm

    def current(self) -> tuple[TransformerLM, Optimizer]:
        """The model and the optimizer as the last step leaves them: an update that is due is taken first.

        With a `ShardedOptimizer` every rank calls it at the same point, as owners send the parameters they updated.
        Weights and moments may be written, too, as from a checkpoint: the next call notices what autograd counts.
        """
        self._notice_writes()
        self._take_update()
        if self.behind:
            self.sharded.send({p: p.data for p in self.parameters})
            self.behind = False
        return self.transformer.model, self.optimizer

    def release(self) -> None:
        """Gives the graph up: NCCL ends only when no graph that has captured it is left. Ranks may call it alone."""
        if self.graph is not None:
            self._notice_writes()
            self._take_update()
            self.graph.reset()
            self.graph = None

    def evaluation_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss (nats) of a batch of any shape with the weights of `current`, which it calls; on the device."""
        self.current()
        return self.transformer.loss(inputs, targets)

    @torch.no_grad()
    def _take_update(self) -> None:
        if self.due:
            self._apply()
            self.due = False
            self.versions = self._versions()

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
        """After a write from outside: copies the parameters again, and drops an update that was due before it."""
        if self.versions != self._versions():
            self.due = False
            self.transformer.refresh()
            self.versions = self._versions()

    def _versions(self) -> list[int]:
        """How often each parameter has been written, by autograd's count, which kernels of our own leave alone."""
        return [p._version for p in self.parameters]

    def _eager(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The step without a graph; an update that is due comes first."""
        if self.adamw is None:
            loss = self._gradients_for_others(inputs, targets)
            return loss, self._other_update()
        self._take_update()
        loss = self._gradients(inputs, targets)
        self._prepare()
        self._measure()
        self.due, self.behind = True, self.sharded is not None
        if not self.pipelined:
            self._take_update()
        return loss, self.adamw.norm.clone()

    def _gradients(self, inputs: Tensor, targets: Tensor, before: Callable[[int], None] = nothing) -> Tensor:
        """Forward and backward pass; what is finished is measured, or begins to be summed over the ranks, beside it."""
        if not self.ranks:
            after = self.adamw.begin_measure if self.adamw is not None else nothing
            return self.transformer.forward_backward(inputs, targets, before, after)
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

        loss = self.transformer.forward_backward(inputs, targets, before, finished)
        finished(set(left))
        for work, _ in sums:
            work.wait()
        if not average:
            torch._foreach_div_([gradient for _, gradient in sums], self.ranks)
        return loss

    def _gradients_for_others(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass, with the gradients in `p.grad`."""
        loss = self._gradients(inputs, targets)
        pairs = [(p.grad, g) for p, g in self.transformer.gradients.items() if p.grad.data_ptr() != g.data_ptr()]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        return loss

    def _other_update(self) -> Tensor:
        norm = gradient_clipping(self.parameters, self.max_grad_norm or math.inf)
        self.optimizer.step()
        self.transformer.refresh()
        self.versions = self._versions()
        return norm

    def _launches(self) -> None:
        """What the graph holds; leaves (loss, norm) in `result`."""
        if self.adamw is None:
            self.result = self._gradients_for_others(*self.batch).float()[None]
            return
        before = self._begin_update() if self.pipelined else nothing
        loss = self._gradients(*self.batch, before)
        self._measure()
        if not self.pipelined:
            self._apply()
        self.result = torch.stack((loss.float(), self.adamw.norm))

    def _begin_update(self) -> Callable[[int], None]:
        """Launches the update on a side stream, part by part; returns what makes the current stream wait for a part."""
        events = {}
        with self.updates():
            for part in sorted(set(self.transformer.parts.values())):
                self.adamw.apply({part})
                events[part] = self.updates.record()
        return lambda part: self.updates.wait(events[part]) if part in events else None

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
            if self.adamw is not None:
                self.adamw.warm_up()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # relaxed: other threads may go on allocating, as one that prefetches batches does
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                self._launches()
        except RuntimeError as error:  # ending a capture that ran out of memory fails as well, and hides why
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        self.graph = graph
        self.versions = self._versions()  # without Triton the captured update counts as a write
