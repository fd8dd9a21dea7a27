"""A whole training step, forward, backward, clipping and update, as one launch: on CUDA a graph of all its kernels."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmcore.errors import require
from lmcore.fused.model import FusedTransformer, nothing
from lmcore.fused.streams import HIGH, Aside
from lmcore.kernels.adamw import FusedAdamW
from lmcore.model import TransformerLM
from lmcore.optimizer import gradient_clipping

FEW_ROWS, NARROW = 2048, 1024
"""Tokens of a batch up to which the update fits in beside the forward pass, and d_model below which it does: on the
H200 it gained at 768, and lost at 2,560, where products fill the chip and only take turns with the update."""


def leaves_room(device: torch.device, rows: int, d_model: int) -> bool:
    """Whether the forward pass of so many tokens leaves a part of the device to the update of the step before."""
    return device.type == "cuda" and rows <= FEW_ROWS and d_model < NARROW


class FusedStep:
    """Updates `model` by one batch of (batch_size, context_length) token ids per call, computing in `dtype`.

    The parameters are the float32 masters. On CUDA the first call captures the step in a CUDA graph, which further
    calls replay: nothing is launched one by one, and nothing waits for the host. With `FusedAdamW` the graph holds
    everything, and the clipping is the optimizer's own; any other optimizer finds float32 gradients in `p.grad`,
    clipped to `max_grad_norm`, and takes its own step outside of the graph. Learning rates may change between calls.

    A `pipelined` step takes its update with the next call, layer after layer beside that call's forward pass, and
    `finish` takes the one that is due: before it, the parameters, the optimizer's moments and `.model` are one step
    behind. Any other call ends with its update. It is the default with `FusedAdamW` on CUDA for small batches of narrow
    models, whose kernels leave multiprocessors idle. `overlap` and `layers_per_product` are those of
    `FusedTransformer`, `.model`. An optimizer serves the last step that was made with it. Raises `UserError` for a
    model or a `dtype` that is not covered, an empty batch, and a `pipelined` step with another optimizer than
    `FusedAdamW`.
    """

    def __init__(
        self,
        model: TransformerLM,
        optimizer: Optimizer,
        batch_size: int,
        context_length: int,
        dtype: torch.dtype = torch.bfloat16,
        max_grad_norm: float | None = None,
        overlap: bool = True,
        layers_per_product: int | None = None,
        pipelined: bool | None = None,
    ):
        found = f"A batch holds at least one id; batch_size is {batch_size} and context_length {context_length}."
        require(min(batch_size, context_length) > 0, found)
        self.model = FusedTransformer(model, dtype, overlap, layers_per_product)
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.parameters = list(self.model.gradients)
        self.shape = torch.Size((batch_size, context_length))
        self.graph: torch.cuda.CUDAGraph | None = None
        ours = isinstance(optimizer, FusedAdamW)
        by_default = ours and leaves_room(self.model.device, self.shape.numel(), model.config.d_model)
        self.pipelined = by_default if pipelined is None else pipelined
        require(
            ours or not self.pipelined,
            f"A pipelined step needs FusedAdamW; {type(optimizer).__name__} takes its own step after each call.",
        )
        self.due = False  # an update
        if ours:
            optimizer.bind(self.model.gradients, self.model.copies, self.model.parts)
        else:
            for p, gradient in self.model.gradients.items():  # what is float32 already serves as it is
                p.grad = gradient if gradient.dtype == p.dtype else torch.zeros_like(p)
        if self.model.device.type == "cuda":
            self.batch = torch.zeros(2, *self.shape, dtype=torch.int64, device=self.model.device)
            self.updates = Aside(self.model.device, self.pipelined)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a step; returns the loss (nats) and the gradients' norm before clipping, scalars on the device.

        Raises `UserError` for a batch of another shape, and `torch.OutOfMemoryError` if the step does not fit.
        """
        for shape in (inputs.shape, targets.shape):
            found = f"This step was made for batches of {tuple(self.shape)} ids, not {tuple(shape)}."
            require(shape == self.shape, found)
        if self.model.device.type != "cuda":
            return self._eager(inputs, targets)
        self.batch[0].copy_(inputs, non_blocking=True)
        self.batch[1].copy_(targets, non_blocking=True)
        if self.graph is None:
            self._capture()
        if not isinstance(self.optimizer, FusedAdamW):
            self.graph.replay()
            return self.result.clone()[0], self._other_update()
        if not self.pipelined:
            self.optimizer.prepare()
        elif not self.due:
            self.optimizer.idle()
        self.graph.replay()
        if self.pipelined:
            self.optimizer.prepare()
            self.due = True
        loss, norm = self.result.clone().unbind()  # the next replay writes over the graph's own
        return loss, norm

    @torch.no_grad()
    def finish(self) -> None:
        """Takes the update that is due, if one is: parameters and optimizer are then those of the last step."""
        if self.due:
            self.optimizer.apply()
            self.due = False

    def weights_changed(self) -> None:
        """To be called when something else has written the parameters or the optimizer's state, as a checkpoint does.

        Copies the parameters again, and drops an update that is due: `finish` before the writing takes it.
        """
        self.due = False
        self.model.refresh()

    def _eager(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The step without a graph; an update that is due comes first."""
        if not isinstance(self.optimizer, FusedAdamW):
            loss = self._gradients_for_others(inputs, targets)
            return loss, self._other_update()
        self.finish()
        loss = self.model.forward_backward(inputs, targets, nothing, self.optimizer.begin_measure)
        self.optimizer.prepare()
        self.optimizer.measure()
        self.due = True
        if not self.pipelined:
            self.finish()
        return loss, self.optimizer.norm.clone()

    def _gradients_for_others(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass, with the gradients in `p.grad`."""
        loss = self.model.forward_backward(inputs, targets)
        pairs = [(p.grad, g) for p, g in self.model.gradients.items() if p.grad.data_ptr() != g.data_ptr()]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        return loss

    def _other_update(self) -> Tensor:
        norm = gradient_clipping(self.parameters, self.max_grad_norm or math.inf)
        self.optimizer.step()
        self.model.refresh()
        return norm

    def _launches(self) -> None:
        """What the graph holds; leaves (loss, norm) in `result`."""
        if not isinstance(self.optimizer, FusedAdamW):
            self.result = self._gradients_for_others(*self.batch).float()[None]
            return
        before = self._begin_update() if self.pipelined else nothing
        loss = self.model.forward_backward(*self.batch, before, self.optimizer.begin_measure)
        self.optimizer.measure()
        if not self.pipelined:
            self.optimizer.apply()
        self.result = torch.stack((loss.float(), self.optimizer.norm))

    def _begin_update(self) -> Callable[[int], None]:
        """Launches the update aside, part by part; what is given back lets the current stream wait for a part."""
        marks = {}
        with self.updates():
            for part in sorted(set(self.model.parts.values())):
                self.optimizer.apply(part)
                marks[part] = self.updates.mark()
        return lambda part: self.updates.join(marks[part]) if part in marks else None

    def _capture(self) -> None:
        """Records the graph. Kernels are compiled before, by passes that write nothing but gradients."""
        device = self.model.device
        stream = torch.cuda.Stream(device, priority=HIGH)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # memory that the first pass allocates in bits, the second finds in place
                self.model.forward_backward(*self.batch)
            if isinstance(self.optimizer, FusedAdamW):
                self.optimizer.warm_up()
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
