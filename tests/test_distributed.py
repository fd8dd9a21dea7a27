"""Collectives, data parallelism and sharding by real processes with gloo: each equal to one process on the whole batch.

Four ranks are started once; smaller worlds are groups of them, so that `group` is tested as well.
"""

import copy
import gc
import multiprocessing
import os
import random
import signal
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parallel_runs import forks
from torch import nn

from lmcore.alone import ALONE
from lmcore.config import ModelConfig, TrainConfig
from lmcore.distributed import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlappedDDP,
    Ranks,
    ShardedOptimizer,
    collectives,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from lmcore.distributed.ranks import RankError, first_ranks
from lmcore.errors import UserError
from lmcore.fast.step import FusedStep
from lmcore.functional import cross_entropy
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW, Muon, gradient_clipping

EACH, LENGTH, VOCABULARY = 2, 8, 33


def start(world_size, timeout=60):
    """Ranks that have not imported PyTorch each for itself, as those of `tests/test_adapters.py` do."""
    with mock.patch.object(multiprocessing, "get_context", return_value=forks()):
        return Ranks(world_size, timeout=timeout)


@pytest.fixture(scope="module")
def ranks():
    with start(4, timeout=120) as ranks:
        yield ranks


def within(rank, size, function, *arguments):
    """On a rank: `function(rank, group, *arguments)` if it belongs to the first `size` ranks, as a group."""
    group = first_ranks(size)
    result = function(rank, group, *arguments) if rank < size else None
    dist.barrier()
    return result


def on(ranks, size, function, *arguments):
    return ranks.run(within, size, function, *arguments)[:size]


# Collectives


def random_collectives(rank, group, seed):
    """Tensors of any length and type, chunks that count as large or not, and a buffer that calls share or none."""
    size, rng = dist.get_world_size(group), random.Random(seed)
    for _ in range(6):
        length, dtype = rng.choice((1, 3, 8, 101)), rng.choice((torch.float64, torch.bfloat16, torch.int32))
        own = [(torch.arange(length) % 5 + r).to(dtype) for r in range(size)]
        total, buffer = sum(own), rng.choice((None, torch.empty(length, dtype=dtype)))
        summed, scattered, gathered = own[rank].clone(), own[rank].clone(), total.clone()
        with mock.patch.object(collectives, "LARGE", rng.choice((1, 2**20))), collectives.registered_memory(group):
            ring_all_reduce(summed, group, buffer)
            chunk = ring_reduce_scatter(scattered, group, buffer)
        for other, part in enumerate(gathered.tensor_split(size)):
            part.fill_(-1) if other != rank else None
        ring_all_gather(gathered, group)
        assert torch.equal(chunk, total.tensor_split(size)[rank])
        assert torch.equal(summed, total)
        assert torch.equal(gathered, total)
    with pytest.raises(UserError):
        ring_all_reduce(torch.zeros(4, 4).T, group)


def test_collectives_are_their_definitions(ranks):
    for size in (1, 2, 3, 4):
        on(ranks, size, random_collectives, size)


# Training


class Odd(nn.Module):
    """Biases, tied weights, a frozen weight, a buffer, a layer that is not used, and rows that no world divides.

    Layers run in another order in the second pass; in the third one runs twice, and one not at all.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(7, 5, bias=False)
        self.second.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(5, 7), nn.Linear(3, 3)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("shift", torch.randn(7))
        self.head, self.passes = nn.Linear(7, VOCABULARY), 0

    def forward(self, ids):
        x, self.passes = self.embedding(ids), self.passes + 1
        a, b = (lambda: torch.tanh(self.first(x))), (lambda: self.second(x * self.scale))
        first, second = {1: (a, b), 2: (b, a), 3: (a, a)}[self.passes]
        return self.head(self.frozen(first() + second()) + self.shift)


def lm(seed=None, **changes):
    if seed is not None:
        torch.manual_seed(seed)
    sizes = {"d_model": 12, "num_layers": 2, "num_heads": 2, "d_ff": 20}
    return TransformerLM(ModelConfig(VOCABULARY, LENGTH, **(sizes | changes)))


MODELS = {"lm": lm, "tied and checkpointed": lambda: lm(tie_embeddings=True, checkpoint_every=1), "odd": Odd}
WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "one bucket": lambda module, group: BucketedDDP(module, 1000, group=group),
    "small buckets": lambda module, group: BucketedDDP(module, 0.0005, group=group),
    "fsdp": FSDP,
}


def batches(size, steps):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(VOCABULARY, (steps, 2, size * EACH, LENGTH), generator=generator)


def fitted(rank, group, model, wrapper=None, clip=None, size=None):
    """Parameters after three steps of AdamW in float64, of the whole model, and norms before clipping.

    Initial weights differ, so that rank 0's must win; with `size`, those of one process on so many ranks' batches.
    """
    torch.manual_seed(rank)
    module = wrapped = MODELS[model]().double()
    part = slice(None)
    if size is None:
        wrapped, part = WRAPPERS[wrapper](module, group=group), slice(rank * EACH, (rank + 1) * EACH)
    optimizer, norms = AdamW(wrapped.parameters(), lr=1e-2), []
    for inputs, targets in batches(size or dist.get_world_size(group), 3)[:, :, part]:
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs), targets).backward()
        if size is None:
            wrapped.finish_gradient_synchronization()
        if clip is not None:
            norms.append(float(gradient_clipping(module.parameters(), clip) if size else wrapped.clip_gradients(clip)))
        optimizer.step()
    whole = wrapped.gather_full_params() if isinstance(wrapped, FSDP) else dict(module.named_parameters())
    return {name: parameter.detach().clone() for name, parameter in whole.items()}, norms


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_equals_one_process(ranks, wrapper):
    rng = random.Random(wrapper)
    for model in MODELS:
        size, clip = rng.choice((2, 3, 4)), 0.5 if wrapper == "fsdp" else None
        want = fitted(0, None, model, clip=clip, size=size)
        for got in on(ranks, size, fitted, model, wrapper, clip):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


SENT = WRAPPERS | {"bfloat16": lambda module, group: FlatDDP(module, torch.bfloat16, group)}
"""How far from the average its rounding is, notebook 09 shows."""


def calls_before_the_end(rank, group, wrapper):
    """All-reduces begun when the backward pass was over, those after it, the most elements of one, and their types.

    Nothing but a cycle holds the wrapper then: once it is dropped, its parameters are gone.
    """
    wrapped = SENT[wrapper](lm(), group=group)
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as calls:
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        cross_entropy(wrapped(ids), ids).backward()
        before = calls.call_count
        wrapped.finish_gradient_synchronization()
        sent = [call.args[0] for call in calls.call_args_list]
    parameter = weakref.ref(next(wrapped.parameters()))
    found = before, len(sent) - before, max(map(torch.numel, sent), default=0), {tensor.dtype for tensor in sent}
    del wrapped, calls, sent
    gc.collect()
    assert parameter() is None
    return found


def test_when_gradients_are_sent_and_that_nothing_keeps_the_parameters(ranks):
    parameters = len(list(lm().parameters()))
    total = sum(parameter.numel() for parameter in lm().parameters())
    found = {wrapper: on(ranks, 2, calls_before_the_end, wrapper)[0] for wrapper in SENT}
    assert found["naive"][:2] == (0, parameters)
    assert found["flat"] == (0, 1, total, {torch.float32})
    assert found["bfloat16"] == (0, 1, total, {torch.bfloat16})
    assert found["overlapped"][:2] == (parameters, 0)
    assert found["one bucket"][:3] == (1, 0, total)
    before, after, largest, _ = found["small buckets"]
    assert after == 0
    assert 1 < before < parameters
    assert largest == VOCABULARY * 12  # a matrix larger than a bucket has one of its own
    assert largest * 4 > 0.0005 * 2**20


def fsdp_state(rank, group):
    """Of two steps: matrices that were whole at a time, and types of computation, gradients and parameters."""
    fsdp, whole = FSDP(lm(0), torch.float16, group), []

    def look(layer, *_):
        whole.append(sum(w.buffer.untyped_storage().nbytes() > 0 for w in fsdp.weights.values()))
        assert layer.weight.dtype == torch.float16

    for layer in fsdp.weights:
        layer.register_forward_pre_hook(look)
    inputs, targets = batches(dist.get_world_size(group), 1)[0, :, rank * EACH : (rank + 1) * EACH]
    for _ in range(2):
        fsdp.zero_grad()
        cross_entropy(fsdp(inputs).float(), targets).backward()
        fsdp.finish_gradient_synchronization()
    assert max(whole) <= 3  # the layer that runs and the two after it
    assert not any(w.buffer.untyped_storage().nbytes() for w in fsdp.weights.values())
    assert sum(p.numel() for p in fsdp.parameters()) < 0.6 * sum(p.numel() for p in lm().parameters())
    assert all(p.dtype == p.grad.dtype == torch.float32 and p.shape == p.grad.shape for p in fsdp.parameters())


def test_fsdp_frees_what_it_gathers_and_keeps_masters(ranks):
    on(ranks, 2, fsdp_state)


# Optimizer state


def groups_of(model):
    """The first has one parameter, so that ranks begin without any."""
    first, *rest = (p for p in model.parameters() if p.ndim > 1)
    decayed = {"weight_decay": 0.1, "orthogonalize": True}
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": [first]} | decayed, {"params": rest} | decayed, {"params": vectors}]


def state_elements(state):
    return sum(v.numel() for values in state.values() for v in values.values() if torch.is_tensor(v))


def steps_of(model, optimizer):
    """The last loss of three steps with a rate that changes as a schedule's does."""
    for step, (inputs, targets) in enumerate(batches(1, 3)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    return loss.item()


def sharded_steps(rank, group, kind, state=None, parameters=None):
    """From the start, groups added later; or resumed from what is given."""
    model = lm(0).double()
    groups = groups_of(model)
    optimizer = ShardedOptimizer(groups[:1], kind, process_group=group, lr=1e-2)
    for later in groups[1:]:
        optimizer.add_param_group(later)
    if state is not None:
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
    loss = steps_of(model, optimizer)
    return dict(model.named_parameters()), optimizer.state_dict(), state_elements(optimizer.local.state), loss


@pytest.mark.parametrize(("kind", "size"), [(AdamW, 2), (Muon, 3)])
def test_sharded_optimizer_equals_the_whole_one_and_resumes_on_any_number_of_ranks(ranks, kind, size):
    model = lm(0).double()
    whole = kind(groups_of(model), lr=1e-2)
    state = parameters = None
    for ranks_here in (size, 5 - size):
        loss = steps_of(model, whole)
        rows = on(ranks, ranks_here, sharded_steps, kind, state, parameters)
        want = copy.deepcopy(whole.state_dict())
        for parameters, state, _, found in rows:
            assert found == pytest.approx(loss, rel=1e-9)
            torch.testing.assert_close(parameters, dict(model.named_parameters()), rtol=1e-9, atol=1e-12)
            assert state["param_groups"] == want["param_groups"]
            torch.testing.assert_close(state["state"], want["state"], rtol=1e-9, atol=1e-12)
        shares = [share for _, _, share, _ in rows]
        assert sum(shares) == state_elements(whole.state)
        assert max(shares) < 1.3 * sum(shares) / ranks_here
    whole.load_state_dict(state)  # and in the unsharded class


def explicit_step(ranks, **changes):
    """The explicit step of a small model, and three batches of twelve sequences."""
    model = ModelConfig(VOCABULARY, LENGTH, d_model=24, num_heads=3, **changes)
    strategy = "fsdp" if ranks else "none"
    config = TrainConfig(model, batch_size=12, ops="fused", device="cpu", precision="fp32", strategy=strategy)
    ids = torch.randint(VOCABULARY, (3, 2, 12, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    return FusedStep.from_config(TransformerLM(model), config, ranks), ids


def divided_step(rank, layers, checkpoint_every, ranks):
    """Three explicit steps with everything divided: this rank's bytes of each kind, and the whole parameters."""
    step, batches = explicit_step(ranks, num_layers=layers, checkpoint_every=checkpoint_every, d_ff=48)
    most = 0
    assert step.transformer.recomputes_elementwise == (ranks > 0 or checkpoint_every is not None)
    if ranks:
        fetch = step.transformer.fetch

        def counting(*arguments):
            nonlocal most
            fetch(*arguments)
            most = max(most, sum(1 <= part <= layers for part in step.exchange.held.values()))

        step.transformer.fetch = counting
    for ids in batches:
        _, norm = step(*(ids.chunk(ranks, dim=1)[rank] if ranks else ids))
    model, optimizer = step.current()
    whole = step.strategy.weights(ALONE)  # as if each rank were the first, which has them
    held = {"masters": [*model.parameters()], "weights": [*step.transformer.compute_weights.values()],
            "moments": [m for state in optimizer.state.values() for m in (state["m"], state["v"])]}  # fmt: skip
    return whole, norm.item(), most, {kind: sum(t.nbytes for t in tensors) for kind, tensors in held.items()}


@pytest.mark.parametrize(("layers", "every"), [(5, None), (1, None), (6, 1)])
def test_an_explicit_step_divides_everything(ranks, layers, every):
    """Equal to one process; of the layers at most three are whole at a time, and a rank keeps its part of the rest."""
    size = ranks.world_size
    alone, norm, _, whole = divided_step(0, layers, every, 0)
    norms = sum(p.nbytes for p in alone.values() if p.ndim == 1)
    for parameters, found, most, held in ranks.run(divided_step, layers, every, size):
        torch.testing.assert_close(parameters, alone, rtol=1e-4, atol=1e-6)
        assert found == pytest.approx(norm, rel=1e-5)
        assert most == min(3, layers)
        rows = size * -(-VOCABULARY // size) - VOCABULARY  # that fill up embedding and head
        expected = {kind: (whole[kind] - of * norms + 2 * of * rows * 24 * 4) / size + of * norms
                    for kind, of in (("masters", 1), ("moments", 2))}  # fmt: skip
        assert held == expected | {"weights": 0}


# The processes themselves


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("refuses", UserError, "The batch has 3 rows, which 2 ranks do not divide."),
        ("dies", RankError, "Rank 1 has ended with exit code -9"),
        ("hangs", RankError, "Rank 1 has not answered within 2 seconds"),
    ],
)
def test_a_rank_that_fails_ends_all(how, error, says):
    def hurt(rank, how):  # as in a cell: no module has it
        if rank == 1 and how == "refuses":
            raise UserError("The batch has 3 rows, which 2 ranks do not divide.")
        if rank == 1 and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "hangs":
            time.sleep(600)
        return rank

    with start(2) as ranks:
        assert ranks.run(hurt, "") == [0, 1]
        processes, ranks.timeout = list(ranks.processes), 2 if how == "hangs" else 60
        with pytest.raises(error, match=says):
            ranks.run(hurt, how)
        assert not any(process.is_alive() for process in processes)
        with pytest.raises(UserError, match="have ended: start new ones"):
            ranks.run(hurt, "")


def test_ranks_that_cannot_start():
    with pytest.raises(UserError, match="99 ranks need as many GPUs"):
        Ranks(99, "nccl")
