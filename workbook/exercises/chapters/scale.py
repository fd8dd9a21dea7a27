"""Exercises of notebooks 07 to 10: kernels, ablations, several processes, and the report's study."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmcore.functional import cross_entropy
from workbook.exercises.exercise import normal

inf = math.inf


def _tiles() -> list[tuple]:
    begin = torch.full((3,), -inf), torch.zeros(3), torch.zeros(3, 2)
    first = normal(3, 4), normal(4, 2)
    return [(begin, *first), (online_softmax(begin, *first), 3 + normal(3, 4), normal(4, 2))]


def online_softmax(state: tuple, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and unnormalized output, (m, l, acc), of the queries after one more tile of keys."""
    m, l, acc = state  # noqa: E741
    m_new = torch.maximum(m, scores.amax(-1))
    shrink, p = torch.exp(m - m_new), torch.exp(scores - m_new[:, None])
    return m_new, l * shrink + p.sum(-1), acc * shrink[:, None] + p @ values


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of attention, tile by tile of `block` queries and keys; (seq, d) each. (Dao et al. 2022)"""
    outputs, sums, positions = [], [], torch.arange(len(k))
    for i in range(0, len(q), block):
        rows = positions[i : i + block]
        state = torch.full((len(rows),), -inf), torch.zeros(len(rows)), torch.zeros(len(rows), v.shape[-1])
        for j in range(0, len(k), block):
            scores = q[rows] @ k[j : j + block].T / math.sqrt(q.shape[-1])
            if causal:
                scores = scores.masked_fill(positions[j : j + block] > rows[:, None], -inf)
            state = online_softmax(state, scores, v[j : j + block])
        m, l, acc = state  # noqa: E741
        outputs.append(acc / l[:, None])
        sums.append(m + l.log())
    return torch.cat(outputs), torch.cat(sums)


def _launch(kernel: Any, q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool) -> dict[str, Tensor]:
    output, lse = torch.full_like(q, math.nan), torch.full((len(q),), math.nan)
    scale = 1 / math.sqrt(q.shape[-1])
    kernel[(len(q) // block,)](q, k, v, output, lse, len(k), scale, q.shape[-1], block, causal)
    return {"output": output, "logsumexp": lse}


def triton_flash_forward(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seq, scale, D, BLOCK, CAUSAL):
    """Flash attention of BLOCK queries, those of this program; all matrices are (seq, D), one row behind the other."""
    rows, columns, keys = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, BLOCK)
    q = tl.load(q_ptr + rows[:, None] * D + columns[None, :])
    m_i = tl.full((BLOCK,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, seq, BLOCK):
        tile = (start + keys)[:, None] * D + columns[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + tile))) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= (start + keys)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        shrink = tl.exp(m_i - m_new)
        p = tl.exp(scores - m_new[:, None])
        l_i = l_i * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p, tl.load(v_ptr + tile))
        m_i = m_new
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], acc / l_i[:, None])
    tl.store(lse_ptr + rows, m_i + tl.log(l_i))


def _backward_case() -> list[tuple]:
    q, k, v, grad = (normal(6, 4) for _ in range(4))
    output, lse = flash_forward(q, k, v, 2, False)
    return [(q, k, v, output, grad, lse)]


def flash_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, of the output's, with the probabilities recomputed from the logsumexp."""
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(q @ k.T * scale - lse[:, None])
    delta = (grad * out).sum(-1, keepdim=True)
    ds = p * (grad @ v.T - delta) * scale
    return ds @ k, ds.T @ q, p.T @ grad


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Mean cross-entropy of x @ weight.T, with the logits of `chunk` rows at a time."""
    total = 0
    for i in range(0, len(x), chunk):
        part = targets[i : i + chunk]
        total = total + cross_entropy(x[i : i + chunk] @ weight.T, part) * len(part)
    return total / len(x)


def post_norm(x: Tensor, attend: Callable, feed_forward: Callable, norm1: Callable, norm2: Callable) -> Tensor:
    """A post-norm block of these functions."""
    x = norm1(x + attend(x))
    return norm2(x + feed_forward(x))


def bits_per_byte(loss: float, tokens: int, size: int) -> float:
    """Of a loss in nats per token, on a text of so many tokens and bytes."""
    return loss * tokens / size / math.log(2)


FINDINGS = [([1.5, 1.6, 1.7], [1.4, 1.5, 1.6]), ([1.5, 1.51, 1.52], [1.4, 1.41, 1.42])]


def is_a_finding(ours: list[float], theirs: list[float]) -> bool:
    """Whether the means of the seeds' losses are further apart than the seeds of one are."""
    apart = abs(sum(ours) / len(ours) - sum(theirs) / len(theirs))
    return apart > max(max(ours) - min(ours), max(theirs) - min(theirs))


def ring_all_reduce(rank: int, size: int, x: Tensor, send: Callable, receive: Callable) -> Tensor:
    """The sum over the ranks; `send` gives a tensor to the next rank, `receive` takes one from the rank before."""
    parts = [*x.chunk(size)]
    for turn in range(size - 1):
        send(parts[(rank - turn) % size])
        at = (rank - turn - 1) % size
        parts[at] = parts[at] + receive()
    for turn in range(size - 1):
        send(parts[(rank + 1 - turn) % size])
        parts[(rank - turn) % size] = receive()
    return torch.cat(parts)


def average_gradients(gradients: list[list[Tensor]]) -> list[Tensor]:
    """The mean over the ranks of each parameter's gradient; a list for each rank."""
    return [torch.stack(of_one).mean(0) for of_one in zip(*gradients, strict=True)]


def _averaged(solution: Callable, overlapped: bool) -> dict[str, Any]:
    """On a rank: weights and gradients of a model that began otherwise than on the other rank."""
    torch.manual_seed(dist.get_rank())
    model, x, during = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3), []
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:

        def backward() -> None:
            model(x).square().mean().backward()
            during.append(sent.call_count > 0)

        solution(model, backward)
    result = {"weights": [p.detach() for p in model.parameters()], "gradients": [p.grad for p in model.parameters()]}
    return result | ({"sent meanwhile": during} if overlapped else {})


def ddp(model: nn.Module, backward: Callable[[], None]) -> None:
    """On each rank: takes rank 0's weights, calls `backward` once, and averages the gradients over the ranks."""
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def overlapped_ddp(model: nn.Module, backward: Callable[[], None]) -> None:
    """As `ddp`, with `dist.all_reduce` of a gradient as soon as it is there, while the backward pass continues."""
    works = []

    def send(p: Tensor) -> None:
        works.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        dist.broadcast(p.data, 0)
        p.register_post_accumulate_grad_hook(send)
    backward()
    for work in works:
        work.wait()
    for p in model.parameters():
        p.grad /= dist.get_world_size()


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Indices of parameters in buckets of at most `limit` numbers, in the order in which gradients become ready."""
    made: list[list[int]] = []
    held = limit
    for index in reversed(range(len(sizes))):
        if not made or held + sizes[index] > limit:
            made.append([])
            held = 0
        made[-1].append(index)
        held += sizes[index]
    return made


def shard(x: Tensor, rank: int, size: int) -> Tensor:
    """The part of a flat tensor that a rank keeps: all parts are equally long, the last padded with zeros."""
    length = math.ceil(len(x) / size)
    part = x[rank * length : (rank + 1) * length]
    return torch.cat((part, x.new_zeros(length - len(part))))


def _updated(solution: Callable) -> dict[str, Any]:
    """On a rank: the parameters after a step with momentum, and for how many of them this rank has the state."""
    torch.manual_seed(0)
    parameters, momentum = [nn.Parameter(torch.randn(3)) for _ in range(4)], {}

    def update(p: Tensor) -> None:
        momentum[p] = 0.9 * momentum.get(p, 0) + p.grad
        p.data -= 0.1 * momentum[p]

    for _ in range(2):
        for p in parameters:
            p.grad = p.detach().clone()
        solution(parameters, update)
    return {"parameters": [p.detach() for p in parameters], "states": len(momentum)}


def zero1_step(parameters: list[nn.Parameter], update: Callable[[Tensor], None]) -> None:
    """On each rank: calls `update(p)` for its part of the parameters alone, and gives the others what it has updated.

    Gradients are the same on all ranks. `update` makes the optimizer's state of a parameter when it is first called.
    """
    for index, p in enumerate(parameters):
        owner = index % dist.get_world_size()
        if owner == dist.get_rank():
            update(p)
        dist.broadcast(p.data, owner)


def _gathered(solution: Callable) -> dict[str, Any]:
    """On a rank: the result and the shard's gradient, and whether the whole weight is still there."""
    shards, seen = [2.0, 3.0, 5.0, 7.0], []
    mine = torch.tensor(shards[2 * dist.get_rank() :][:2])

    def compute(whole: Tensor) -> Tensor:
        seen.append(ref(whole))
        return whole @ torch.tensor([1.0, 10.0, 100.0, 1000.0])

    return {"result": solution(mine, compute), "whole weights afterwards": sum(one() is not None for one in seen)}


def fsdp_gather(shard: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """On each rank: puts the flat weight together from all ranks' equal shards, computes with it, and lets go of it."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return compute(torch.cat(parts))


def sharded_ffn(x: Tensor, w1: list[Tensor], w2: list[Tensor]) -> Tensor:
    """relu(x W1^T) W2^T, of whose hidden features each rank has some: rows of W1 and columns of W2."""
    hidden = [torch.relu(x @ part.T) for part in w1]
    return torch.stack([h @ part.T for h, part in zip(hidden, w2, strict=True)]).sum(0)


def zero1_bytes(parameters: float, ranks: int) -> float:
    """Bytes on each rank in float32: weights and gradients whole, AdamW's state divided."""
    return 8 * parameters + 8 * parameters / ranks


def fsdp_bytes(parameters: float, ranks: int) -> float:
    """Bytes on each rank in float32: weights, gradients and AdamW's state divided."""
    return 16 * parameters / ranks


def bubble(stages: int, batches: int) -> float:
    """The share of a pipeline's time in which a stage waits, with so many micro-batches."""
    return (stages - 1) / (batches + stages - 1)


LAYER = [(131_072, 2560, 10_240, 16, 989.4e12, 450e9), (4096, 4608, 12_288, 4, 1e15, 25e9)]


def data_parallel_calcs(b: int, d: int, f: int, n: int, c: float, w: float) -> dict[str, float]:
    """The backward pass of a SwiGLU layer, of b tokens on n devices; the handout's B, D, D_FF, N, C and W, FP16.

    FLOPs of a device, seconds of communication, and the most devices that it does not slow down.
    """
    return {"flops": 12 * b * d * f / n, "seconds": (n - 1) / n * 12 * d * f / w, "devices": 1 + b * w / c}


def fsdp_calcs(b: int, d: int, f: int, n: int, c: float, w: float) -> dict[str, float]:
    """As `data_parallel_calcs`, for the forward pass with FSDP."""
    return {"flops": 6 * b * d * f / n, "seconds": (n - 1) / n * 6 * d * f / w, "devices": 1 + b * w / c}


def tp_calcs(b: int, d: int, f: int, n: int, c: float, w: float) -> dict[str, float]:
    """As `data_parallel_calcs`, for the forward pass with tensor parallelism."""
    return {"flops": 6 * b * d * f / n, "seconds": (n - 1) / n * 4 * b * d / w, "devices": 1 + 3 * f * w / (2 * c)}


def fsdp_tp_calcs(b: int, d: int, f: int, n_fsdp: int, n_tp: int, c: float, w: float) -> dict[str, float]:
    """As `data_parallel_calcs`, for the forward pass on n_fsdp * n_tp devices whose two kinds of messages overlap."""
    gather, reduce = (n_fsdp - 1) / n_fsdp * 6 * d * f / n_tp / w, (n_tp - 1) / n_tp * 4 * b * d / n_fsdp / w
    flops, devices = 6 * b * d * f / (n_fsdp * n_tp), (1 + b * w / c) * (1 + 3 * f * w / (2 * c))
    return {"flops": flops, "seconds": max(gather, reduce), "devices": devices}


XXL, XXL_TOKEN = 2 * 16_384 * 53_248 * 126, 2 * (16_384 + 53_248) * 126
"""Parameters of the handout's XXL, and bytes that a token leaves for its backward pass in BF16."""
ALPHA = 4.6e14 / (2 * 9e10)


def _reason(plan: dict[str, int]) -> str:
    """What keeps a plan for XXL on 1,024 H100s from 80% of their peak, by notebook 09's forecast; or "nothing"."""
    data, sharded, tensor, pipeline = (plan[name] for name in ("data", "sharded", "tensor", "pipeline"))
    if data * sharded * tensor * pipeline != 1024:
        return "GPUs"
    blocks, batches = math.ceil(126 / pipeline), 2048 / (data * sharded)
    weights, stream = blocks * 2 * 16_384 * 53_248 / tensor, 2 * 2048 * 16_384
    saved = blocks * 2048 * 2 * (16_384 + 53_248 / tensor)
    if 16 * weights / sharded + min(batches, pipeline) * saved > 80e9:
        return "memory"
    sums = 2 * blocks * batches * 2 * (tensor - 1) / tensor * stream / (450e9 if tensor <= 8 else 25e9)
    shards, copies = 3 * batches * (sharded - 1) / sharded * 2 * weights, 2 * (data - 1) / data * 2 * weights / sharded
    messages = (shards + copies + 2 * batches * stream / tensor * (pipeline > 1)) / 25e9
    computing = 6 * weights * batches * 2048 / 989.4e12
    step = (computing + sums) / (1 - bubble(pipeline, batches))
    ideal = 6 * XXL * 2048 * 2048 / (1024 * 989.4e12)
    return "nothing" if ideal > 0.8 * max(step, messages) else "messages" if messages > step else "waiting"


def word_perplexity(loss: float, tokens: int, words: int) -> float:
    """Of a loss in nats per token."""
    return math.exp(loss * tokens / words)


def accumulated(loss: Callable, weight: Tensor, batches: list[Tensor]) -> Tensor:
    """Gradient of the mean loss over all batches, one of which is in memory at a time."""
    weight = weight.detach().requires_grad_()
    for batch in batches:
        (loss(weight, batch) / len(batches)).backward()
    return weight.grad


def chosen_loss(dev: list[float], validation: list[float]) -> float:
    """The validation loss of the step that `dev` chooses."""
    return validation[dev.index(min(dev))]
