"""Exercises of notebooks 07 to 10: kernels, ablations, several processes, and the report's study."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from lmcore.functional import cross_entropy
from lmcore.model import sinusoidal_positions
from workbook.exercises.exercise import exercise, normal

kernels = partial(exercise, notebook="07_kernels")
experiments = partial(exercise, notebook="08_experiments")
distributed = partial(exercise, notebook="09_distributed")
study = partial(exercise, notebook="10_wikitext")


def online_softmax(state: tuple, scores: Tensor, values: Tensor, **slip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and unnormalized output, (m, l, acc), of the queries after one more tile of keys."""
    m, total, acc = state
    new = torch.maximum(m, scores.amax(-1))
    shrink, p = torch.exp(m - new), torch.exp(scores - new[:, None])
    kept = total if slip.get("keep_sum") else total * shrink
    acc_kept = acc if slip.get("keep_acc") else acc * shrink[:, None]
    return new, kept + p.sum(-1), acc_kept + p @ values


def _tiles() -> list[tuple]:
    begin = torch.full((3,), -math.inf), torch.zeros(3), torch.zeros(3, 2)
    first = normal(3, 4), normal(4, 2)
    return [(begin, *first), (online_softmax(begin, *first), 3 + normal(3, 4), normal(4, 2))]


kernels(
    "online_softmax",
    online_softmax,
    _tiles,
    mistakes={
        "What was summed before belongs to another maximum: the sum is to be rescaled.": partial(
            online_softmax, keep_sum=True
        ),
        "The output of earlier tiles belongs to another maximum.": partial(online_softmax, keep_acc=True),
    },
)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool, **slip: Any) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of attention, tile by tile of `block` queries and keys; (seq, d) each."""
    outputs, sums = [], []
    positions = torch.arange(len(k))
    for i in range(0, len(q), block):
        rows = len(q[i : i + block])
        state = torch.full((rows,), -math.inf), torch.zeros(rows), torch.zeros(rows, v.shape[-1])
        for j in range(0, len(k) - slip.get("short", 0) * block, block):
            scores = q[i : i + block] @ k[j : j + block].T / (q.shape[-1] ** 0.5 if slip.get("scaled", True) else 1)
            if causal:
                above = positions[j : j + block] > torch.arange(i, i + rows)[:, None]
                scores = scores.masked_fill(above, -math.inf if slip.get("forbids", True) else 0.0)
            state = online_softmax(state, scores, v[j : j + block])
        m, total, acc = state
        outputs.append(acc / total[:, None])
        sums.append(total.log() if slip.get("bare") else m + total.log())
    return torch.cat(outputs), torch.cat(sums)


kernels(
    "flash_forward",
    flash_forward,
    lambda: [(*(normal(n, 4) for n in (8, 8, 8)), 4, True), (*(normal(n, 8) for n in (6, 6, 6)), 2, False)],
    mistakes={
        "The backward pass needs the logsumexp: the maximum is missing in it.": partial(flash_forward, bare=True),
        "The scores are too large: by what are they divided?": partial(flash_forward, scaled=False),
        "A forbidden key still gets weight.": partial(flash_forward, forbids=False),
        "The last tile of keys is left out.": partial(flash_forward, short=1),
    },
    avoid=("softmax", "scaled_dot_product_attention", "logsumexp"),
    tolerance=1e-4,
)


def flash_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, **slip: bool) -> tuple:
    """Gradients of q, k and v, of the output's, with the probabilities recomputed from the logsumexp."""
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(q @ k.T * scale - lse[:, None])
    dp = grad @ v.T
    ds = p * (dp if slip.get("no_delta") else dp - (grad * out).sum(-1, keepdim=True))
    ds = ds if slip.get("unscaled") else ds * scale
    return ds @ k, ds.T @ q, p.T @ grad


def _backward_case() -> list[tuple]:
    q, k, v = (normal(6, 4) for _ in range(3))
    return [(q, k, v, flash_forward(q, k, v, 2, False)[0], normal(6, 4), flash_forward(q, k, v, 2, False)[1])]


kernels(
    "flash_backward",
    flash_backward,
    _backward_case,
    mistakes={
        "The gradient of softmax has a second term: what is D?": partial(flash_backward, no_delta=True),
        "The scale of the scores is in their gradient, too.": partial(flash_backward, unscaled=True),
        "The gradients of q and k are exchanged.": lambda *a: (
            flash_backward(*a)[1],
            flash_backward(*a)[0],
            flash_backward(*a)[2],
        ),
    },
    avoid=("grad", "backward", "softmax", "scaled_dot_product_attention"),
    tolerance=1e-4,
)


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, **slip: bool) -> Tensor:
    """Mean cross-entropy of x @ weight.T, with the logits of `chunk` rows at a time."""
    losses = [
        cross_entropy(x[i : i + chunk] @ weight.T, targets[i : i + chunk]) * len(x[i : i + chunk])
        for i in range(0, len(x), chunk)
    ]
    return torch.stack(losses).sum() / len(x)


kernels(
    "chunked_loss",
    chunked_loss,
    lambda: [(normal(7, 4), normal(9, 4), torch.arange(7), 3), (normal(4, 2), normal(5, 2), torch.arange(4), 4)],
    mistakes={
        "The last chunk is shorter: a mean of means weighs it too much.": lambda x, weight, targets, chunk: torch.stack(
            [cross_entropy(x[i : i + chunk] @ weight.T, targets[i : i + chunk]) for i in range(0, len(x), chunk)]
        ).mean(),
        "The last, shorter chunk is left out.": lambda x, weight, targets, chunk: cross_entropy(
            x[: len(x) // chunk * chunk] @ weight.T, targets[: len(x) // chunk * chunk]
        ),
    },
    avoid=("cross_entropy", "nll_loss"),
)
kernels(
    "causal_tiles",
    16 * 17 // 2,
    mistakes={
        "Tiles above the diagonal need not be computed.": 16 * 16,
        "Tiles on the diagonal have allowed keys, too.": 16 * 15 // 2,
    },
    tolerance=1e-9,
)


def post_norm(x: Tensor, attend: Callable, feed_forward: Callable, norm1: Callable, norm2: Callable) -> Tensor:
    """A post-norm block."""
    x = norm1(x + attend(x))
    return norm2(x + feed_forward(x))


experiments(
    "post_norm",
    post_norm,
    lambda: [(normal(2, 3), torch.sin, torch.cos, torch.tanh, torch.sigmoid)],
    mistakes={
        "This is pre-norm: here the sum is normalized.": lambda x, attend, feed_forward, norm1, norm2: (
            (y := x + attend(norm1(x))) + feed_forward(norm2(y))
        ),
        "Only the branch is normalized; the sum is to be.": lambda x, attend, feed_forward, norm1, norm2: (
            (y := x + norm1(attend(x))) + norm2(feed_forward(y))
        ),
        "Both branches see the block's input; the second sees what the first made.": (
            lambda x, attend, feed_forward, norm1, norm2: norm2(norm1(x + attend(x)) + feed_forward(x))
        ),
    },
)
experiments(
    "silu_width",
    2016,
    mistakes={
        "SwiGLU has three matrices; a network without a gate has two.": 1344,
        "This has more parameters than the gated one.": 2688,
        "This has fewer parameters than the gated one.": 896,
    },
    tolerance=1e-9,
)
experiments(
    "bits_per_byte",
    lambda loss, tokens, size: loss * tokens / size / math.log(2),
    [(3.0, 1000, 4000), (1.5, 100, 450)],
    mistakes={
        "The loss is in nats; a bit is ln 2 of them.": lambda loss, tokens, size: loss * tokens / size,
        "A token has several bytes: the more, the fewer bits on each.": lambda loss, tokens, size: (
            loss * size / tokens / math.log(2)
        ),
    },
)
experiments(
    "is_a_finding",
    lambda ours, theirs: (
        abs(sum(ours) / len(ours) - sum(theirs) / len(theirs)) > max(max(ours) - min(ours), max(theirs) - min(theirs))
    ),
    [
        ([1.5, 1.6, 1.7], [1.4, 1.5, 1.6]),
        ([1.5, 1.51, 1.52], [1.4, 1.41, 1.42]),
        ([1.5, 1.51], [1.4, 1.58]),
        ([1.5, 1.7], [1.5, 1.6]),
    ],
    mistakes={
        "Means always differ: by more than the seeds do?": lambda ours, theirs: sum(ours) != sum(theirs),
        "The best seed of each is no comparison.": lambda ours, theirs: abs(min(ours) - min(theirs)) > 0.05,
    },
)


def ring_all_reduce(rank: int, size: int, x: Tensor, send: Callable, receive: Callable, **slip: Any) -> Tensor:
    """The sum over the ranks; `send` gives a tensor to the next rank, `receive` takes one from the rank before."""
    parts = [part.clone() for part in x.chunk(size)]
    for turn in range(size - 1):
        send(parts[(rank - turn) % size])
        at = (rank - turn - 1) % size
        received = receive()
        parts[at] = received if slip.get("replaces") else parts[at] + received
    for turn in range(0 if slip.get("half") else size - 1):
        send(parts[(rank + 1 - turn) % size])
        parts[(rank - turn) % size] = receive()
    return torch.cat(parts)


def _on_ranks(solution: Callable, xs: Sequence[Tensor]) -> list[Tensor]:
    """What each rank returns; the ranks are threads, and a message that never comes is an error."""
    size, results = len(xs), {}
    boxes: list[Queue] = [Queue() for _ in xs]

    def work(rank: int) -> None:
        try:
            send = lambda x: boxes[(rank + 1) % size].put(x.clone())  # noqa: E731
            results[rank] = solution(rank, size, xs[rank].clone(), send, lambda: boxes[rank].get(timeout=3))
        except Exception as error:
            results[rank] = error

    threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = next((result for result in results.values() if isinstance(result, Exception)), None)
    if failed is not None:
        raise failed
    return [results[rank] for rank in range(size)]


distributed(
    "ring_all_reduce",
    ring_all_reduce,
    lambda: [([normal(6) for _ in range(n)],) for n in (2, 3)],
    mistakes={
        "Each rank has the sum of one part: the sums have to go round, too.": partial(ring_all_reduce, half=True),
        "What arrives replaces a part; it is to be added.": partial(ring_all_reduce, replaces=True),
    },
    use=_on_ranks,
    avoid=("all_reduce",),
)


def buckets(sizes: list[int], limit: int, backwards: bool = True, over: bool = False) -> list[list[int]]:
    """Indices of parameters in buckets of at most `limit` numbers, in the order in which gradients become ready."""
    order = list(reversed(range(len(sizes)))) if backwards else list(range(len(sizes)))
    made: list[list[int]] = []
    for index in order:
        held = sum(sizes[i] for i in made[-1]) if made else limit
        if made and (held < limit if over else held + sizes[index] <= limit):
            made[-1].append(index)
        else:
            made.append([index])
    return made


distributed(
    "buckets",
    lambda sizes, limit: buckets(sizes, limit),
    [([4, 4, 2, 6, 1], 8), ([10, 1], 4), ([3, 3, 3], 100)],
    mistakes={
        "The last layer's gradients are ready first.": partial(buckets, backwards=False),
        "A bucket is fuller than the limit.": partial(buckets, over=True),
    },
)


def shard(x: Tensor, rank: int, size: int, padded: bool = True) -> Tensor:
    """The part of a flat tensor that a rank keeps: all parts are equally long, the last padded with zeros."""
    length = -(-len(x) // size) if padded else len(x) // size
    part = x[rank * length : (rank + 1) * length]
    return torch.cat((part, x.new_zeros(length - len(part))))


distributed(
    "shard",
    lambda x, rank, size: shard(x, rank, size),
    lambda: [(torch.arange(1.0, 8.0), rank, 3) for rank in range(3)] + [(torch.arange(1.0, 5.0), 1, 2)],
    mistakes={
        "Numbers at the end belong to no rank.": partial(shard, padded=False),
        "Numbers are dealt out in turn; a rank keeps a run of neighbors.": lambda x, rank, size: (
            shard(x, 0, size) * 0 + torch.cat((x, x.new_zeros(-len(x) % size)))[rank::size]
        ),
    },
    avoid=("chunk", "tensor_split"),
)


def sharded_ffn(x: Tensor, w1: list[Tensor], w2: list[Tensor], **slip: bool) -> Tensor:
    """relu(x W1^T) W2^T, of whose hidden features each rank has some: rows of W1 and columns of W2."""
    hidden = [torch.relu(x @ part.T) for part in w1]
    if slip.get("summed"):
        total = torch.stack([x @ part.T for part in w1]).sum(0)
        hidden = [torch.relu(total)] * len(w1)
    parts = torch.stack([h @ part.T for h, part in zip(hidden, w2, strict=True)])
    return parts.mean(0) if slip.get("mean") else parts.sum(0)


distributed(
    "sharded_ffn",
    sharded_ffn,
    lambda: [(normal(2, 3), [normal(4, 3), normal(4, 3)], [normal(3, 4), normal(3, 4)])],
    mistakes={
        "Ranks hold different hidden features: nothing is added before relu.": partial(sharded_ffn, summed=True),
        "The parts are added up, not averaged.": partial(sharded_ffn, mean=True),
    },
)
RING = 2 * 7 / 8 * 100
distributed(
    "ring_megabytes",
    RING,
    mistakes={
        "Sums go round, and then come back: there are two rounds.": RING / 2,
        "Messages are parts of the tensor, not the whole.": 2 * 7 * 100.0,
        "Of eight parts, seven are sent in a round.": 200.0,
    },
    tolerance=1e-3,
)
distributed(
    "zero1_bytes",
    lambda parameters, ranks: 8 * parameters + 8 * parameters / ranks,
    [(1e9, 4), (1e9, 1)],
    mistakes={
        "Weights and gradients are whole on each rank.": lambda n, ranks: 16 * n / ranks,
        "AdamW keeps two moments for each parameter.": lambda n, ranks: 8 * n + 4 * n / ranks,
    },
)
distributed(
    "bubble",
    lambda stages, batches: (stages - 1) / (batches + stages - 1),
    [(4, 8), (2, 1), (1, 5)],
    mistakes={
        "The share is of the whole time, in which the bubble is, too.": lambda p, m: (p - 1) / m,
        "The first stage does not wait for itself.": lambda p, m: p / (m + p),
    },
)


def average_gradients(gradients: list[list[Tensor]]) -> list[Tensor]:
    """The mean over the ranks of each parameter's gradient."""
    return [torch.stack(of_one).mean(0) for of_one in zip(*gradients, strict=True)]


distributed(
    "average_gradients",
    average_gradients,
    lambda: [([[normal(2), normal(3)] for _ in range(3)],)],
    mistakes={
        "The sum is as large as a larger learning rate.": lambda gradients: [
            torch.stack(of_one).sum(0) for of_one in zip(*gradients, strict=True)
        ],
        "This is one rank's gradient: what have the others seen?": lambda gradients: gradients[0],
    },
)
study(
    "word_perplexity",
    lambda loss, tokens, words: math.exp(loss * tokens / words),
    [(3.0, 120, 100), (4.0, 10, 10)],
    mistakes={
        "This is per token; a word has more than one.": lambda loss, tokens, words: math.exp(loss),
        "Perplexities are not proportional to tokens: the exponent is.": lambda loss, tokens, words: (
            math.exp(loss) * tokens / words
        ),
    },
)
study(
    "sinusoidal_positions",
    sinusoidal_positions,
    [(5, 8), (3, 4)],
    mistakes={
        "Sines and cosines take turns; here they are halves.": lambda seq, d: torch.cat(
            ((s := sinusoidal_positions(seq, d))[:, 0::2], s[:, 1::2]), -1
        ),
        "Sines come first.": lambda seq, d: sinusoidal_positions(seq, d).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    },
)


def accumulated(loss: Callable, weight: Tensor, batches: list[Tensor], mean: bool = True) -> Tensor:
    """Gradient of the mean loss over all batches, one of which is in memory at a time."""
    weight = weight.detach().requires_grad_()
    for batch in batches:
        (loss(weight, batch) / (len(batches) if mean else 1)).backward()
    return weight.grad


def _squares(weight: Tensor, batch: Tensor) -> Tensor:
    return (batch @ weight).square().mean()


study(
    "accumulated",
    lambda loss, weight, batches: accumulated(loss, weight, batches),
    lambda: [(_squares, normal(3), [normal(4, 3) for _ in range(3)])],
    mistakes={
        "The gradients are added up; the loss is a mean.": partial(accumulated, mean=False),
        "Only the last batch is in it.": lambda loss, weight, batches: accumulated(loss, weight, batches[-1:]),
    },
)
study(
    "chosen_loss",
    lambda dev, validation: validation[dev.index(min(dev))],
    [([3.0, 2.0, 2.5], [3.1, 2.2, 2.3]), ([1.0, 2.0], [1.5, 1.4]), ([2.0, 1.0, 3.0], [1.0, 1.6, 1.9])],
    mistakes={
        "The validation text has chosen its own best step; `dev` is to choose.": lambda dev, validation: min(
            validation
        ),
        "This is the loss on `dev`.": lambda dev, validation: min(dev),
        "This is the last step, not the chosen one.": lambda dev, validation: validation[-1],
    },
)
