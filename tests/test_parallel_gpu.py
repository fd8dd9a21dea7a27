"""`lmcore train --strategy` over NCCL, on as many GPUs as there are: with one GPU, a group of one rank."""
# ruff: noqa: F401, F811

import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parallel_runs import small_config
from test_parallel_training import STRATEGIES, alone, back_to, complete, data, same_run, same_up_to_rounding, trainers

from lmcore.config import TrainConfig, model_config, replace
from lmcore.device import reset_peak_memory
from lmcore.distributed import Ranks, collectives, ring_all_reduce
from lmcore.model import TransformerLM
from lmcore.run import RunFolder
from lmcore.train import training_step

pytestmark = pytest.mark.gpu
RANKS = [1] + [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
EXPLICIT = {"ops": "fused", "precision": "bf16", "model__d_model": 128, "model__num_heads": 2, "model__d_ff": 256}
EXPLICIT |= {"batch_size": 16, "model__context_length": 64}


def config_here(data, **changes):
    return small_config(data, device="cuda", batch_size=8 * RANKS[-1], **changes)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nccl_trains_what_one_process_trains(trainers, data, alone, tmp_path, strategy, ranks):
    run = RunFolder(tmp_path / "run")
    form = "sharded" if ranks > 1 else "whole"
    complete(trainers.train(config_here(data, strategy=strategy, checkpoints=form), run.path, ranks))
    same_run(run, alone(config_here(data)))
    back_to(run, 8)
    complete(trainers.train(config_here(data, strategy="fsdp"), run.path, ranks))
    same_run(run, alone(config_here(data)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("strategy", "optimizer"), [("ddp", "adamw"), ("ddp", "muon"), ("zero1", "adamw"), ("fsdp", "adamw")]
)
def test_the_explicit_step_with_nccl_in_its_graph(trainers, data, alone, tmp_path, ranks, strategy, optimizer):
    """As one process trains, and on from a checkpoint as if nothing had been; the graph lets go of NCCL at the end."""
    config, run = replace(config_here(data), optimizer__name=optimizer, **EXPLICIT), RunFolder(tmp_path / "run")
    for _ in range(2):
        ended = trainers.train(replace(config, strategy=strategy), run.path, ranks)
        complete(ended)
        assert "does not cover" not in ended[0].printed
        same_up_to_rounding(run, alone(config))
        back_to(run, 8)


def ring_beside_nccl(rank, large):
    """Whether the ring gives what NCCL does, exactly, of whole numbers."""
    equal = []
    for length in (1, 1001, 3_000_000):
        with mock.patch.object(collectives, "LARGE", large), collectives.registered_memory():
            ours = (torch.arange(length, device="cuda") % 1000 * (rank + 1)).float()
            theirs = ours.clone()
            for tensor, reduce in ((ours, ring_all_reduce), (theirs, dist.all_reduce)):
                reduce(tensor)
            equal.append(torch.equal(ours, theirs))
            del ours, theirs, tensor
    return all(equal)


@pytest.mark.parametrize("ranks", RANKS)
def test_ring_sums_what_nccl_does(ranks):
    with Ranks(ranks, "nccl", timeout=120) as processes:
        assert all(processes.run(ring_beside_nccl, 1))  # in halves
        assert all(processes.run(ring_beside_nccl, 2**40))  # whole
