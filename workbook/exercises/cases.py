"""What the catalogue's Python knows: inputs of exercises, and what is done with a solution where it is no plain call.

The solutions of notebooks are executed here, each with those before it; `load` fills `EXERCISES`.
"""

# ruff: noqa: F401, F811 (the catalogue and the solutions use what is imported)

import io
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import numpy as np
import regex
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmcore import accounting, functional, model, optimizer
from lmcore.config import model_config, replace
from lmcore.files import read_json
from lmcore.functional import cross_entropy, softmax
from lmcore.functional import scaled_dot_product_attention as attention
from lmcore.optimizer import EagerOptimizer, with_gradient
from lmcore.tokenizer.pretokenize import GPT2_PATTERN
from workbook.exercises import ranks
from workbook.exercises.exercise import EXERCISES, Exercise, normal
from workbook.exercises.solutions import FILE


def to_bytes(text: str) -> tuple[bytes, ...]:
    """The bytes of a text in UTF-8, each by itself."""
    return tuple(bytes([byte]) for byte in text.encode())


MERGES = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), (b"\xc3", b"\xa9")]
VOCABULARY = {0: b"ab", 1: b"\xc3", 2: b"\xa9", 3: b"c"}


def tokenized(solution: Any, text: str) -> dict[str, Any]:
    """What a tokenizer makes of a text, and how many texts it has read when the first id of several comes."""
    merges, read = [*MERGES, (b"bc", b" ")], []  # the last of which never applies inside a pretoken
    tokens = [bytes([i]) for i in range(256)] + [a + b for a, b in merges] + [b"<|end|>", b"<|end|><|end|>"]
    tokenizer, plain = (solution(dict(enumerate(tokens)), merges, of) for of in (["<|end|>", "<|end|><|end|>"], []))
    first = next(iter(tokenizer.encode_iterable(read.append(text) or text for _ in range(3))))
    ids = {"ids": tokenizer.encode(text), "ids without special tokens": plain.encode("abc"), "first id": first}
    return ids | {"text": tokenizer.decode(ids["ids"]), "texts read for the first id": len(read)}


XL = replace(model_config("xl", vocab_size=50_257, context_length=1024), d_ff=4288)
PARAMETERS, FLOPS = accounting.num_parameters(XL), accounting.forward_flops_by_component(XL)
FORWARD, HEAD = sum(FLOPS.values()), XL.vocab_size * XL.d_model
SCORES = 4 * 2 * XL.num_layers * XL.num_heads * XL.context_length**2
FIXED, ONE = 16 * PARAMETERS, 4 * sum(accounting.activation_counts(XL).values())
UPDATE = sum(accounting.ADAMW_FLOPS.values())

WIDE = replace(XL, d_ff=6400)  # CSE599-O's GPT-2 XL: d_ff = 4 d_model
LISTED = replace(WIDE, ffn="silu")  # has the activations that `adamwAccounting` lists
PARAMETERS_2, FORWARD_2 = accounting.num_parameters(WIDE), accounting.forward_flops(WIDE)
ONE_2 = 4 * sum(accounting.activation_counts(LISTED).values())

HOURS = 3 * FORWARD * 1024 * 400_000 / (0.5 * 495e12) / 3600
CACHE = 2 * 48 * 1600 * 1024 * 2 / 1e6
DAYS = 3 * FORWARD_2 * 1024 * 400_000 / (0.5 * 19.5e12) / (24 * 3600)


class Momentum(EagerOptimizer):
    """Gradient descent with momentum. PyTorch's own would first import its compiler: seconds."""

    @torch.no_grad()
    def step(self) -> None:
        for p in with_gradient(self.param_groups[0]):
            self.state[p]["m"] = 0.9 * self.state[p].get("m", 0.0) + p.grad
            p -= 0.1 * self.state[p]["m"]


def resumed(solution: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """A model after two steps, a checkpoint of `solution` = (save, load), and two more steps by new objects."""
    save, load = solution

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, Momentum(model.parameters(), {})

    first, second, file = new(), new(), io.BytesIO()
    train_loop(*first, [(x, y)] * 2)
    save(*first, 2, file)
    file.seek(0)
    step = load(file, *second)
    train_loop(*second, [(x, y)] * 2)
    return {"step": step} | dict(second[0].state_dict())


def linear_problem() -> list[tuple]:
    model = nn.Linear(2, 1)
    model.load_state_dict({"weight": normal(1, 2), "bias": normal(1)})
    return [(model, Momentum(model.parameters(), {}), [(normal(4, 2), normal(4, 1)) for _ in range(5)])]


def distributions() -> list[Tensor]:
    return [torch.tensor([0.5, 0.1, 0.3, 0.1]), torch.tensor([0.05, 0.05, 0.9]), softmax(normal(6), -1)]


def counting(ids: list[int]) -> Tensor:
    """A model of 7 tokens whose likeliest next one depends on the whole window; 0 ends a text."""
    assert 0 < len(ids) <= 4, "the window has at most 4 ids"
    return torch.eye(7)[(3 * sum(ids) + len(ids)) % 7]


class Device:
    """A clock, and a device behind it: a step is queued in 1 ms and takes 10 and more, the first two take 50."""

    def __init__(self) -> None:
        self.now, self.done, self.steps = 0.0, 0.0, 0

    def step(self) -> None:
        self.now += 0.001
        self.done = max(self.done, self.now) + (0.05 if self.steps < 2 else 0.01 + 0.001 * self.steps)
        self.steps += 1

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        return self.now


def on_a_device(solution: Callable, warmup: int, steps: int) -> list[float]:
    device = Device()
    return solution(device.step, device.synchronize, device.clock, warmup, steps)


RANGES = [("step", 0, 100), ("forward", 1, 20), ("attention", 5, 12), ("backward", 21, 60)]


def blocks() -> list[nn.Module]:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    for layer in layers:
        layer.load_state_dict({"weight": normal(4, 4), "bias": normal(4)})
    return [nn.Sequential(layer, nn.Tanh()) for layer in layers]


def kept(solution: Callable, blocks: list[nn.Module], x: Tensor, every: int) -> dict[str, Any]:
    """The result, the gradient of x, and how many numbers were kept for the backward pass."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(0 if isinstance(tensor, nn.Parameter) else tensor.numel())
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = solution(blocks, x, every)
    y.sum().backward()
    return {"result": y.detach(), "gradient": x.grad, "numbers kept": sum(kept)}


def tiles() -> list[tuple]:
    begin = torch.full((3,), -math.inf), torch.zeros(3), torch.zeros(3, 2)
    first = normal(3, 4), normal(4, 2)
    return [(begin, *first)] + [(online_softmax(begin, *first), by + normal(3, 4), normal(4, 2)) for by in (3, -3)]


def launch(kernel: Any, q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool) -> dict[str, Tensor]:
    output, lse = torch.full_like(q, math.nan), torch.full((len(q),), math.nan)
    scale = 1 / math.sqrt(q.shape[-1])
    kernel[(len(q) // block,)](q, k, v, output, lse, len(k), scale, q.shape[-1], block, causal)
    return {"output": output, "logsumexp": lse}


def backward_case(*masked: bool) -> list[tuple]:
    q, k, v, grad = (normal(7, 4) for _ in range(4))
    return [(q, k, v, (of := flash_forward(q, k, v, 2, causal))[0], grad, of[1], causal) for causal in masked]


FINDINGS = [([1.5, 1.6, 1.7], [1.4, 1.5, 1.6]), ([1.5, 1.51, 1.52], [1.4, 1.41, 1.42])]


def averaged(solution: Callable, overlapped: bool) -> dict[str, Any]:
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


def updated(solution: Callable) -> dict[str, Any]:
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


def gathered(solution: Callable) -> dict[str, Any]:
    """On a rank: the result and the shard's gradient, and whether the whole weight is still there."""
    shards, seen = [2.0, 3.0, 5.0, 7.0], []
    mine = torch.tensor(shards[2 * dist.get_rank() :][:2])

    def compute(whole: Tensor) -> Tensor:
        seen.append(ref(whole))
        return whole @ torch.tensor([1.0, 10.0, 100.0, 1000.0])

    return {"result": solution(mine, compute), "whole weights afterwards": sum(one() is not None for one in seen)}


LAYER = [(131_072, 2560, 10_240, 16, 989.4e12, 450e9), (4096, 4608, 12_288, 4, 1e15, 25e9)]
XXL, XXL_TOKEN = 2 * 16_384 * 53_248 * 126, 2 * (16_384 + 53_248) * 126
"""Parameters of the handout's XXL, and bytes that a token leaves for its backward pass in BF16."""
ALPHA = 4.6e14 / (2 * 9e10)


def reason(plan: dict[str, int]) -> str:
    """What keeps a plan for XXL on 1,024 H100s from 80% of their peak, by notebook 09's forecast; or "nothing"."""
    data, sharded, tensor, pipeline = (plan[name] for name in ("data", "sharded", "tensor", "pipeline"))
    if data * sharded * tensor * pipeline != 1024 or any(n != int(n) for n in plan.values()):
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


def load(catalogue: Path) -> None:
    """Fills `EXERCISES` in the order of the catalogue, which is that of the notebooks."""
    solutions = read_json(FILE)
    for notebook, entries in yaml.safe_load(catalogue.read_text(encoding="utf-8")).items():
        for name, entry in entries.items():
            EXERCISES[name] = Exercise.of_entry(name, notebook, globals(), entry, solutions[name])


load(Path(__file__).with_name("catalogue.yaml"))
