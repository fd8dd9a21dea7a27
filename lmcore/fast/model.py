"""Forward and backward pass of the Transformer written out by hand, over packed weights and our kernels.

The same mathematics as `lmcore.model` with autograd, in fewer passes over memory and without its graph. Letters: B
batch, T positions, H heads, K head size, D d_model, F d_ff, V vocabulary, N = B * T rows, L layers, G layers a group.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import wraps

import torch
from torch import Tensor, nn

from lmcore.config import ModelConfig
from lmcore.errors import require
from lmcore.fast.kernels.cross_entropy import Lesson, linear_cross_entropy_gradients, linear_cross_entropy_loss
from lmcore.fast.kernels.dispatch import on_device_of
from lmcore.fast.kernels.rmsnorm import num_partials, rmsnorm_backward, rmsnorm_forward, sum_partials
from lmcore.fast.kernels.rope import rope_
from lmcore.fast.kernels.rope_attention import rope_attention_backward, rope_attention_forward
from lmcore.fast.kernels.swiglu import swiglu_backward_, swiglu_forward
from lmcore.fast.packing import PackedMatrices, norm_weights_of
from lmcore.fast.streams import SideStream
from lmcore.fast.support import precision_of, unsupported_reason
from lmcore.model import TransformerLM

ROWS_PER_PRODUCT, MOST_LAYERS = 32_768, 8
"""Rows of activations that one batched matmul of weight gradients takes, since fewer would leave multiprocessors idle,
and layers at most: on the H200 from 4 to 12 of them differ by less than a percent of the step, and need more memory."""
FEW_TOKENS = 3072
"""Up to so many, PyTorch's gradient of an embedding rounds each sum of 32 rows to the type of `dx`."""
GATHERED, UNREDUCED = 3, 2
"""Of divided matrices: layers whose weights are whole at a time, the one in use and the next two, and layers whose
whole gradients may wait for the network."""


def on_its_device(method: Callable) -> Callable:
    """A method of `FusedTransformer` without autograd, on the model's device, where Triton launches its kernels.

    New memory stays as it is: deterministic algorithms would fill it, to show what reads it before it is written.
    """

    @wraps(method)
    def call(self, *arguments):
        fills = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            with on_device_of(self.norm_weight_grads), torch.no_grad():
                return method(self, *arguments)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fills

    return call


def nothing(*_: int | Collection[int]) -> None:
    """Default callback: does nothing."""


def dropout_forward(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """`lmcore.functional.dropout`, with its numbers off CUDA; and which elements it keeps, None without one."""
    if p == 0.0:
        return x, None
    if x.is_cuda:
        return torch.native_dropout(x, p, True)
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    return x * kept * (1.0 / (1.0 - p)), kept


def dropout_backward(dy: Tensor, kept: Tensor | None, p: float, dx: Tensor | None = None) -> Tensor:
    """The gradient before dropout, in `dx` if given; `dy` itself where there is none."""
    if kept is None:
        return dy
    if dx is None:
        return torch.ops.aten.native_dropout_backward(dy, kept, 1.0 / (1.0 - p))
    return torch.ops.aten.native_dropout_backward.out(dy, kept, 1.0 / (1.0 - p), out=dx)


class Group:
    """What the backward pass needs of G consecutive layers: operands of weight gradients stacked, the rest in lists."""

    def __init__(self, config: ModelConfig, layers: range, x: Tensor):
        self.layers, self.d_ff = layers, config.d_ff
        self.heads = x.new_empty(len(layers), *x.shape)
        self.saved: list[Saved] = []
        self.allocate_products()
        self.allocate_elementwise()

    def allocate_products(self) -> None:
        """Memory for what the layers' matrices give out."""
        size, rows, d = self.heads.shape
        self.qkv = self.heads.new_empty(size, rows, 3 * d)
        self.ab = self.heads.new_empty(size, rows, 2 * self.d_ff)  # W1 x and W3 x; in the backward pass their gradients

    def allocate_elementwise(self) -> None:
        """Memory for the elementwise results among them: the norms' outputs and the gated product."""
        self.normed1, self.normed2 = torch.empty_like(self.heads), torch.empty_like(self.heads)
        self.h = self.heads.new_empty(*self.heads.shape[:2], self.d_ff)

    def free(self, products: bool) -> None:
        """Frees the elementwise results, which are cheap to recompute, and the `products`.

        That leaves what is `saved`, and attention's output, the most expensive to recompute.
        """
        del self.normed1, self.normed2, self.h
        if products:
            del self.qkv, self.ab

    def begin_backward(self, dropout: float) -> None:
        """Makes room for the gradients of what the layers' matrices gave out."""
        size, rows, d = self.heads.shape
        self.dy, self.dx2 = torch.empty_like(self.heads), torch.empty_like(self.heads)
        self.dffn, self.dattn = self.dy, self.dx2  # before dropout, which leaves them as they are without one
        if dropout:
            self.dffn, self.dattn = torch.empty_like(self.heads), torch.empty_like(self.heads)
        self.dqkv = self.heads.new_empty(size, rows, 3 * d)


@dataclass
class Saved:
    """Of one layer: inputs of its norms (N, D), their 1 / rms (N,), attention's log-sum-exp, and what dropout keeps of
    the outputs of attention and feed-forward network."""

    x1: Tensor
    rstd1: Tensor
    lse: Tensor = field(init=False)
    x2: Tensor = field(init=False)
    rstd2: Tensor = field(init=False)
    kept1: Tensor | None = field(init=False)
    kept2: Tensor | None = field(init=False)


class FusedTransformer:
    """The loss of a `TransformerLM` and its gradients, in `dtype`, which is bfloat16 or float32.

    `compute_weights` maps each matrix of the model to its copy in `dtype`, which `refresh` brings up to date with the
    parameters; the norm weights are read where they are. `gradients` maps every parameter to where `forward_backward`
    leaves its gradient: in `dtype` for matrices, float32 for norm weights. Both are views that stay.
    `layers_per_matmul` is G, how many layers share one batched matmul of weight gradients (None: by the number of
    rows). A model with `checkpoint_every`, whatever its value, saves of each layer the inputs of both norms and
    attention's output, and recomputes the rest one group at a time (selective recomputation, Korthikanti et al. 2022).

    With `ranks` parameters and `gradients` are a rank's rows of each matrix (`distributed.fsdp.FSDP`), and
    `sharding.Shards` casts and gathers the matrices of a few layers at a time. Outputs of norms and of the gate are
    then always recomputed. Raises `UserError` for a model or a `dtype` that it does not cover.
    """

    def __init__(self, model: TransformerLM, dtype: torch.dtype, ranks: int = 0):
        reason = unsupported_reason(model.config, precision_of(dtype), ranks)
        require(reason is None, f"The fused step does not cover {reason}.")
        self.model, self.config, self.dtype = model, model.config, dtype
        self.device = model.lm_head.weight.device
        self.layers_per_matmul = 1 if ranks else None
        slots = (GATHERED, UNREDUCED) if ranks else (None, None)
        self.weights, self.grads = (PackedMatrices(model, dtype, slots[i], max(1, ranks)) for i in range(2))
        self.norm_weights = norm_weights_of(model)
        self.norm_weight_grads = torch.zeros(len(self.norm_weights), self.config.d_model, device=self.device)
        self.compute_weights = {} if ranks else dict(self.weights.views)
        gradients = {p: torch.zeros_like(p, dtype=dtype) for p in self.grads.views} if ranks else self.grads.views
        self.gradients = gradients | dict(zip(self.norm_weights, self.norm_weight_grads, strict=True))
        self.fetch: Callable[[int, int], None] = nothing  # a part's weights, and which way the pass goes
        self.vacate: Callable[[range], None] = nothing  # where these layers' gradients will be
        rope = model.layers[0].attn.rope
        self.angles = None if rope is None else (rope.cos, rope.sin)
        self.eps = model.ln_final.eps
        self.side_stream = SideStream(self.device)
        self.teacher: FusedTransformer | None = None  # whose predictions have this share in what is learned
        self.teacher_share = 0.0
        self.recomputes = model.config.checkpoint_every is not None
        self.recomputes_elementwise = self.recomputes or bool(ranks)
        self.refresh()

    @classmethod
    def predictor(cls, model: TransformerLM, dtype: torch.dtype) -> "FusedTransformer":
        """One that only predicts, as a teacher does: without gradients and float32 matrices."""
        made = cls(model, dtype)
        del made.model, made.grads, made.gradients, made.compute_weights, made.weights.views
        return made

    @on_its_device
    def refresh(self) -> None:
        """Copies the parameters into the compute weights, after anything but the step's optimizer changed them."""
        if self.compute_weights:
            torch._foreach_copy_(list(self.compute_weights.values()), [p.detach() for p in self.compute_weights])

    @on_its_device
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of `targets` (B, T) after `inputs` (B, T); nothing is kept for a backward pass."""
        normed = self._hidden(inputs)
        return linear_cross_entropy_loss(normed, self.weights.head, targets.flatten(), self.config.vocab_size)

    def _hidden(self, inputs: Tensor) -> Tensor:
        """What the head reads, (N, D), of `inputs` (B, T) without dropout; the head's weights are there afterwards."""
        x, branch = self._embed(inputs), None
        for index in range(self.config.num_layers):
            group = Group(self.config, range(index, index + 1), x)
            x, branch = self._layer_forward(group, 0, x, branch, inputs.shape, 0.0)
        self.fetch(1 + self.config.num_layers, 1)
        return self._norm(-1, x, branch)[1]

    @property
    def parts(self) -> dict[nn.Parameter, int]:
        """In which part of the forward pass each parameter is first read: embedding and norms, the layers, the head."""
        first = dict.fromkeys((*self.norm_weights, self.model.token_embeddings.weight), 0)
        layers = {p: 1 + layer for layer, block in enumerate(self.model.layers) for p in block.parameters()}
        return {self.model.lm_head.weight: 1 + self.config.num_layers} | layers | first

    def packed_gradients(self, parts: Collection[int]) -> list[Tensor]:
        """The gradients of these `parts`, layers one behind the other, in as few contiguous tensors as possible."""
        head, layers = 1 + self.config.num_layers, [part - 1 for part in parts if 1 <= part <= self.config.num_layers]
        found = self.grads.of_layers(range(min(layers), max(layers) + 1)) if layers else []
        if 0 in parts:
            found += [self.grads.embedding, self.norm_weight_grads]
        return found + ([self.grads.head] if head in parts and not self.config.tie_embeddings else [])

    @on_its_device
    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        after: Callable[[Collection[int]], None] = nothing,
    ) -> Tensor:
        """The same loss; leaves its gradients in `gradients`, in place of what was there. No host synchronisation.

        With a `teacher` the gradients are those of the mixture, see `Lesson`.

        `after(parts)` is called, on the side stream, where the gradients of layers and head are final.
        """
        lesson = None
        if self.teacher is not None:
            lesson = Lesson(self.teacher._hidden(inputs), self.teacher.weights.head, self.teacher_share)
        groups, x, branch, kept = self._forward_groups(inputs)
        self.fetch(1 + self.config.num_layers, 1)
        x, normed, rstd = self._norm(-1, x, branch)
        loss, dnormed, _ = linear_cross_entropy_gradients(
            normed, self.weights.head, targets.flatten(), self.config.vocab_size, dw=self.grads.head, lesson=lesson
        )
        if not self.config.tie_embeddings:
            with self.side_stream():
                after({1 + self.config.num_layers})
        partials = x.new_empty(len(self.norm_weights), num_partials(x), self.config.d_model, dtype=torch.float32)
        groups[-1].begin_backward(self.config.dropout)
        self._norm_backward(-1, dnormed, x, rstd, None, groups[-1].dy[-1], partials)
        dx = torch.empty_like(x)
        in_use = self._backward_groups(groups, dx, inputs.shape, partials, after)
        sum_partials(partials, self.norm_weight_grads)
        self._embedding_backward(dropout_backward(dx, kept, self.config.dropout), inputs)
        self.side_stream.wait()
        del in_use
        return loss

    def _norm(
        self, index: int, x: Tensor, branch: Tensor | None, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum x + branch (N, D), what norm `index` of the model makes of it, in `y` if given, and its 1 / rms."""
        return rmsnorm_forward(x, self.norm_weights[index], self.eps, branch, y)

    def _norm_backward(
        self, index: int, dy: Tensor, x: Tensor, rstd: Tensor, residual: Tensor | None, dx: Tensor, partials: Tensor
    ) -> None:
        """Writes the gradient of the input of `_norm`, plus `residual`, into `dx`, and the weight's into `partials`."""
        rmsnorm_backward(dy, x, self.norm_weights[index], rstd, residual=residual, dx=dx, partials=partials[index])

    def _embed(self, inputs: Tensor) -> Tensor:
        length, most = inputs.shape[1], self.config.context_length
        require(length <= most, f"The input has {length} positions; context_length is {most}.")
        self.fetch(0, 1)
        return self.weights.embedding.index_select(0, inputs.flatten())

    def _embedding_backward(self, dx: Tensor, inputs: Tensor) -> None:
        """Adds up the rows of `dx` (N, D) with the same token, in a fixed order and with float32 sums.

        Tied embeddings already hold the head's gradient.
        """
        gradient, ids, tied = self.grads.embedding, inputs.flatten(), self.config.tie_embeddings
        if len(ids) > FEW_TOKENS:
            # int: half as many bytes to sort
            sums = torch.ops.aten.embedding_dense_backward(dx, ids.int(), len(gradient), -1, False)
            (gradient.add_ if tied else gradient.copy_)(sums)
            return
        if not tied:
            gradient.zero_()
        same = (ids[:, None] == ids).to(dx.dtype)
        gradient.index_copy_(0, ids, gradient[ids] + same @ dx)  # a token's places all write the same

    def _forward_groups(self, inputs: Tensor) -> tuple[list[Group], Tensor, Tensor, Tensor | None]:
        """All layers; returns what the backward pass needs, the two summands of the residual stream at the end, and
        what dropout keeps of the embeddings."""
        branch, groups = None, []
        x, kept = dropout_forward(self._embed(inputs), self.config.dropout)
        most = 1 if self.recomputes else MOST_LAYERS
        per_group = self.layers_per_matmul or min(most, max(1, ROWS_PER_PRODUCT // x.shape[0]))
        for first in range(0, self.config.num_layers, per_group):
            group = Group(self.config, range(first, min(first + per_group, self.config.num_layers)), x)
            for i in range(len(group.layers)):
                x, branch = self._layer_forward(group, i, x, branch, inputs.shape, self.config.dropout)
            if self.recomputes_elementwise:
                group.free(products=self.recomputes)
            groups.append(group)
        return groups, x, branch, kept

    def _layer_forward(
        self, group: Group, i: int, x: Tensor, branch: Tensor | None, shape: torch.Size, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """Layer `i` of the group on the sum x + branch (N, D); gives back its result as two summands likewise."""
        layer, w, qkv = group.layers[i], self.weights, group.qkv[i]
        self.fetch(1 + layer, 1)
        x, normed, rstd = self._norm(2 * layer, x, branch, group.normed1[i])
        saved = Saved(x, rstd)
        torch.mm(normed, w.qkv[w.slot(layer)].t(), out=qkv)
        saved.lse = rope_attention_forward(qkv, self.angles, (*shape, self.config.num_heads), group.heads[i])
        branch, saved.kept1 = dropout_forward(torch.mm(group.heads[i], w.out[w.slot(layer)].t()), dropout)
        saved.x2, _, saved.rstd2 = self._norm(2 * layer + 1, x, branch, group.normed2[i])
        torch.mm(group.normed2[i], w.w13[w.slot(layer)].t(), out=group.ab[i])
        swiglu_forward(group.ab[i], group.h[i])
        branch, saved.kept2 = dropout_forward(torch.mm(group.h[i], w.w2[w.slot(layer)].t()), dropout)
        group.saved.append(saved)
        return saved.x2, branch

    def _recompute(self, group: Group, length: int) -> None:
        """The operands of the group's layers that were freed, from what was saved."""
        group.allocate_elementwise()
        if self.recomputes:
            group.allocate_products()
        w = self.weights
        for i, (layer, saved) in enumerate(zip(group.layers, group.saved, strict=True)):
            self._norm(2 * layer, saved.x1, None, group.normed1[i])
            self._norm(2 * layer + 1, saved.x2, None, group.normed2[i])
            if self.recomputes:
                self.fetch(1 + layer, -1)
                torch.mm(group.normed1[i], w.qkv[w.slot(layer)].t(), out=group.qkv[i])
                if self.angles is not None:
                    rope_(group.qkv[i], *self.angles, length)
                torch.mm(group.normed2[i], w.w13[w.slot(layer)].t(), out=group.ab[i])
            swiglu_forward(group.ab[i], group.h[i])

    def _backward_groups(
        self, groups: list[Group], dx: Tensor, shape: torch.Size, partials: Tensor, after: Callable
    ) -> list:
        """Goes back through all layers; the gradient of their result is in the last group's `dy`, leaves that of the
        embeddings (N, D) in `dx`. Gives back what the weight gradients on the side stream still read."""
        in_use: list[tuple[Group, torch.cuda.Event | None]] = []
        while groups:
            group = groups.pop()
            if self.recomputes_elementwise:
                self._recompute(group, shape[1])
            if groups:
                groups[-1].begin_backward(self.config.dropout)
            for i in reversed(range(len(group.layers))):
                before = group.dy[i - 1] if i else groups[-1].dy[-1] if groups else dx
                self._layer_backward(group, i, before, shape, partials)
            with self.side_stream():
                self._weight_gradients(group)
                in_use.append((group, self.side_stream.record()))
                after({1 + layer for layer in group.layers})
            if len(in_use) > 1:  # at most two groups are in memory
                self.side_stream.wait(in_use.pop(0)[1])
        return in_use

    def _layer_backward(self, group: Group, i: int, dx: Tensor, shape: torch.Size, partials: Tensor) -> None:
        """Writes the gradient of layer `i`'s input into `dx`, given that of its result in `group.dy[i]`."""
        layer, w, saved = group.layers[i], self.weights, group.saved[i]
        slot, p = w.slot(layer), self.config.dropout
        self.fetch(1 + layer, -1)
        dropout_backward(group.dy[i], saved.kept2, p, group.dffn[i])
        swiglu_backward_(torch.mm(group.dffn[i], w.w2[slot]), group.ab[i])
        dnormed = torch.mm(group.ab[i], w.w13[slot])
        self._norm_backward(2 * layer + 1, dnormed, saved.x2, saved.rstd2, group.dy[i], group.dx2[i], partials)
        dropout_backward(group.dx2[i], saved.kept1, p, group.dattn[i])
        self._attention_backward(group, i, torch.mm(group.dattn[i], w.out[slot]), shape)
        dnormed = torch.mm(group.dqkv[i], w.qkv[slot])
        self._norm_backward(2 * layer, dnormed, saved.x1, saved.rstd1, group.dx2[i], dx, partials)

    def _attention_backward(self, group: Group, i: int, dheads: Tensor, shape: torch.Size) -> None:
        """Leaves the gradient of layer `i`'s joint projection in `group.dqkv[i]`, given that of the heads (N, D)."""
        qkv, dqkv, heads, lse = group.qkv[i], group.dqkv[i], group.heads[i], group.saved[i].lse
        rope_attention_backward(qkv, heads, lse, dheads, dqkv, self.angles, (*shape, self.config.num_heads))

    def _weight_gradients(self, group: Group) -> None:
        """dW = dy^T x of every matrix of the group's layers, one batched matmul per kind of matrix."""
        self.vacate(group.layers)
        first = self.grads.slot(group.layers.start)
        layers = slice(first, first + len(group.layers))
        for dy, x, dw in (
            (group.dffn, group.h, self.grads.w2),
            (group.ab, group.normed2, self.grads.w13),
            (group.dattn, group.heads, self.grads.out),
            (group.dqkv, group.normed1, self.grads.qkv),
        ):
            torch.bmm(dy.transpose(1, 2), x, out=dw[layers])
