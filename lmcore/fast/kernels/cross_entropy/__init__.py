"""Output embedding and cross-entropy in one, without ever holding more than a chunk of the logits.

The rows go through in chunks: the logits of a chunk, their softmax, and at once the gradients, for which nothing else
is needed than p - onehot(target), the gradient of the logits. It overwrites them in place, so that the memory is that
of one chunk whatever the batch. The matmuls are PyTorch's; the pass between them is a Triton kernel on CUDA.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmcore.errors import require
from lmcore.fast.kernels.dispatch import by_triton
from lmcore.functional import at_least_float32

CHUNK_BYTES = 800 * 2**20
"""Memory for the logits of a chunk, or as much as the sum of the weight's gradient takes, if that is more: fewer chunks
mean fewer passes over the sum."""

CPU_CHUNK_ROWS = 256
"""Most rows of a chunk on a CPU, whose caches keep such logits from one matmul to the next."""

ALIGNMENT = 16
"""Rows of the weight are padded to a multiple of this, so that rows of logits are aligned in memory: matmuls with
GPT-2's 50,257 columns run at a seventh of the speed of those with 50,256 or 50,304.
"""


class Lesson(NamedTuple):
    """What a teacher predicts of the same tokens: softmax(x weight^T), with the weight `share` in what is learned."""

    x: Float[Tensor, "N D_teacher"]
    weight: Float[Tensor, "rows_teacher D_teacher"]
    share: float


def linear_cross_entropy(x: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"]) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over the rows, in nats: `cross_entropy(x @ weight.T, targets)`.

    Differentiable in `x` and `weight`: the gradients are computed in the forward pass, where the logits are. Under
    autocast x and weight are cast to its type; the softmax is in float32 (or float64) always. Raises `UserError` for
    shapes or types that do not fit, float16, no rows, and on the CPU for ids outside the vocabulary; on other devices
    such an id makes the loss NaN.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, weight))
    with torch.autocast(kind, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return _LinearCrossEntropy.apply(x, weight, targets)
        return linear_cross_entropy_loss(x, weight, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss; the backward pass scales them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss, *gradients = linear_cross_entropy_gradients(x, weight, targets)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = ctx.saved_tensors
        return dx * gradient, dw * gradient, None


@torch.no_grad()
def linear_cross_entropy_gradients(
    x: Float[Tensor, "N D"],
    weight: Float[Tensor, "rows D"],
    targets: Int[Tensor, " N"],
    num_rows: int | None = None,
    dw: Float[Tensor, "rows D"] | None = None,
    chunk_rows: int | None = None,
    lesson: Lesson | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dw): the mean cross-entropy and its gradients, outside of autograd; a CUDA graph can capture it.

    With a `lesson` the gradients are those of (1 - share) times the loss plus share times the cross-entropy with the
    teacher's probabilities (`lmcore.functional.soft_cross_entropy`).

    Only the first `num_rows` rows of `weight` are the vocabulary; the rest is padding and gets zero gradients. `dw`,
    of the weight's type, is written if given; it is summed in at least float32. `chunk_rows` is the number of rows of
    `x` at a time.
    """
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    losses, total = _chunks(x, weight, targets, num_rows, dx, dw, chunk_rows, lesson)
    if total is not dw:
        dw = total.to(weight.dtype) if dw is None else dw.copy_(total)
    return losses.mean(), dx, dw


@torch.no_grad()
def linear_cross_entropy_loss(
    x: Float[Tensor, "N D"], weight: Float[Tensor, "rows D"], targets: Int[Tensor, " N"], num_rows: int | None = None
) -> Tensor:
    """The mean cross-entropy alone, for evaluation; see `linear_cross_entropy_gradients`."""
    return _chunks(x, weight, targets, num_rows)[0].mean()


@by_triton
def softmax_gradient(
    logits: Float[Tensor, "n columns"], targets: Int[Tensor, " n"], losses: Tensor, num_rows: int,
    scale: float | None, teacher: Float[Tensor, "n columns_teacher"] | None = None, share: float = 0.0,
) -> None:  # fmt: skip
    """Writes each row's cross-entropy into `losses`, and (p - onehot(target)) * scale over the logits.

    Columns from `num_rows` on are padding: they count for nothing and get zeros. Without `scale` the logits stay. With
    the logits of a `teacher`, (1 - share) onehot(target) + share softmax(teacher) takes the place of the onehot.
    """
    shifted = at_least_float32(logits[:, :num_rows])
    shifted = shifted - shifted.amax(dim=-1, keepdim=True)
    exponentials = shifted.exp()
    totals = exponentials.sum(dim=-1, keepdim=True)
    torch.sub(totals.log(), shifted.gather(-1, targets.unsqueeze(-1)), out=losses.unsqueeze(-1))
    if scale is not None:
        gradient = exponentials.mul_(scale / totals)
        if teacher is not None:
            gradient.sub_(at_least_float32(teacher[:, :num_rows]).softmax(dim=-1), alpha=scale * share)
        gradient.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(totals, -scale * (1 - share)))
        logits[:, :num_rows] = gradient
        logits[:, num_rows:] = 0


def default_chunk_rows(num_rows: int, row_bytes: int, chunk_bytes: int) -> int:
    """Rows per chunk: as many as `chunk_bytes` hold, in chunks of nearly equal size that are multiples of 128."""
    most = max(chunk_bytes // row_bytes // 128, 1)
    blocks = -(-num_rows // 128)
    chunks = -(-blocks // most)
    return min(-(-blocks // chunks) * 128, num_rows)


def _chunks(
    x: Tensor, weight: Tensor, targets: Tensor, num_rows: int | None = None, dx: Tensor | None = None,
    dw: Tensor | None = None, chunk_rows: int | None = None, lesson: Lesson | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(loss of each row, sum of the weight's gradient), chunk after chunk; no gradients without `dx`.

    The sum is `dw` itself if that has room and rounds nothing on the way; of several chunks it is at least float32.
    """
    num_rows = len(weight) if num_rows is None else num_rows
    _check(x, weight, targets, num_rows)
    n, rows, padded_bytes = len(x), len(weight), 0
    if rows % ALIGNMENT:
        padded = weight.new_empty(rows + -rows % ALIGNMENT, weight.shape[1])
        padded[:rows], padded[rows:] = weight, 0
        weight, padded_bytes = padded, padded.nbytes
    x, weight, targets = x.contiguous(), weight.contiguous(), targets.contiguous()
    row_bytes, memory = len(weight) * x.element_size(), max(CHUNK_BYTES, 4 * weight.numel()) - padded_bytes
    if x.device.type == "cpu":
        memory = min(memory, CPU_CHUNK_ROWS * row_bytes)
    size = chunk_rows or default_chunk_rows(n, row_bytes, memory if lesson is None else memory // 2)
    losses = x.new_empty(n, dtype=torch.promote_types(x.dtype, torch.float32))
    buffer = x.new_empty(min(size, n), len(weight))
    teacher = None if lesson is None else x.new_empty(len(buffer), len(lesson.weight))
    total, scale = None, None if dx is None else 1 / n
    if dx is not None:
        dtype = weight.dtype if size >= n else losses.dtype
        fits = dw is not None and (dw.shape, dw.dtype) == (weight.shape, dtype)
        total = dw if fits else torch.empty_like(weight, dtype=dtype)
    for start in range(0, n, size):
        part = slice(start, min(start + size, n))
        logits = buffer[: part.stop - start]
        torch.mm(x[part], weight.t(), out=logits)
        if lesson is None:
            softmax_gradient(logits, targets[part], losses[part], num_rows, scale)
        else:
            predicted = torch.mm(lesson.x[part], lesson.weight.t(), out=teacher[: len(logits)])
            softmax_gradient(logits, targets[part], losses[part], num_rows, scale, predicted, lesson.share)
        if total is not None:
            torch.mm(logits, weight, out=dx[part])
            _add_product(total, logits.t(), x[part], first=start == 0)
    return losses, total if total is None or total is dw else total[:rows]


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b, or total += a @ b, in the type of `total`, which may be wider than that of `a` and `b`."""
    wider = total.dtype != a.dtype
    if wider and not a.is_cuda:
        product = a.to(total.dtype) @ b.to(total.dtype)
        total.copy_(product) if first else total.add_(product)
        return
    options = {"out_dtype": total.dtype} if wider else {}
    torch.mm(a, b, out=total, **options) if first else torch.addmm(total, a, b, out=total, **options)


def _check(x: Tensor, weight: Tensor, targets: Tensor, num_rows: int) -> None:
    require(
        x.ndim == 2 and weight.shape[1:] == x.shape[1:] and targets.shape == x.shape[:1] and len(x) > 0,
        "linear_cross_entropy needs x (N, D), weight (V, D) and targets (N) of at least one row, "
        f"not {tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}.",
    )
    require(
        x.dtype == weight.dtype and x.dtype in (torch.float64, torch.float32, torch.bfloat16),
        f"linear_cross_entropy takes x and weight in float32, float64 or bfloat16, both alike, not {x.dtype} and "
        f"{weight.dtype}: in float16 a loss scale would come too late for its gradients.",
    )
    require(targets.dtype in (torch.int32, torch.int64), f"Targets must be int64 or int32, not {targets.dtype}.")
    if targets.device.type == "cpu":
        low, high = targets.min().item(), targets.max().item()
        require(low >= 0 and high < num_rows, f"Targets must be from 0 to {num_rows - 1}, not from {low} to {high}.")
