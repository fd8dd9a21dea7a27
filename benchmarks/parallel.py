"""Training steps on several GPUs of one machine: lmcore's ways to divide the work beside PyTorch's with Hugging Face.

    torchrun --nproc-per-node 8 benchmarks/parallel.py                        # to results/h200/parallel_8.json
    torchrun --nproc-per-node 2 benchmarks/parallel.py --toy --out runs/toy/parallel.json

Weak scaling: each rank has the batch that is named, so that the command with 1, 2, 4 and 8 ranks, into the same file,
shows what is lost. Strong scaling: works that end in "in all" divide their batch among the ranks. Contestants have the
machine to themselves, one after another, since their models would not fit beside each other; each is checked by its
first losses, and timed in rounds of steps that run back to back.
"""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import tyro
from benchmark_cases import Absent
from peers import hugging_face
from steps import bound, captured, peer_step
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lmcore.accounting import training_flops
from lmcore.config import OptimizerConfig, TrainConfig, model_config, replace
from lmcore.device import (
    device_name,
    out_of_memory_reason,
    peak_flops,
    reset_peak_memory,
    set_matmul_precision,
    synchronize,
)
from lmcore.distributed import ring_all_reduce
from lmcore.distributed.collectives import registered_memory, use_all_channels
from lmcore.errors import require
from lmcore.files import read_json, write_json
from lmcore.model import TransformerLM
from lmcore.profiling.nsys.torch_trace import read_torch_trace
from lmcore.profiling.nsys.trace import occupied
from lmcore.profiling.plausible import refusal
from lmcore.provenance import environment
from lmcore.train import training_step

WORKS = {
    "tinystories-256x256": ("tinystories", 256, 256),
    "large-4x1024": ("large", 1024, 4),
    "2.7b-4x512": ("2.7b", 512, 4),
    "tinystories-256x256 in all": ("tinystories", 256, 256),
}
"""Model size, context, and sequences of each rank or in all."""

LMCORE = {
    **{f"lmcore explicit step, {way}": {"ops": "fused", "strategy": way} for way in ("ddp", "zero1", "fsdp")},
    "lmcore explicit step, fsdp, recomputing": {"ops": "fused", "strategy": "fsdp", "model__checkpoint_every": 1},
    **{f"lmcore {way}": {"strategy": way} for way in ("ddp", "zero1", "fsdp", "torch-fsdp2")},
}
"""Our contestants, as `lmcore train` has them."""

PEERS = ("HF compiled, torch DDP", "HF compiled, FSDP2")
GRAPHS = ("HF compiled + CUDA graph, torch DDP", "HF compiled + CUDA graph, FSDP2")
"""Peers that run only if they are named, in a process of their own: a capture that fails spoils it."""
COLLECTIVES = ("NCCL", "lmcore ring")
WARMUPS, ROUNDS, SECONDS, COMPARED, PROFILED = 11, 7, 0.5, 3, 5
"""Steps before a peer is captured (DDP arranges its buckets anew in the first ten), rounds of a contestant, how long
each takes, first losses that are compared, steps under a profiler at the end."""


def main(
    out: Path | None = None,
    only: tuple[str, ...] = (),
    contestants: tuple[str, ...] = (),
    toy: bool = False,
    times: int = 1,
) -> None:
    """Measures on all ranks; rank 0 prints and writes.

    Args:
        out: the JSON file to write, row by row; default: results/h200/parallel_N.json for N ranks.
        only: works by name, and all-reduce; default: all.
        contestants: by name; default: all but those whose names have "+ CUDA graph", which take a process each.
        toy: small sizes on CPUs, nothing compiled: to try the command; its times mean nothing.
        times: how often each contestant of a work is measured, in turns. Its row is the median run, and `runs` has the
            seconds of all. What the file holds of fewer runs is measured anew.
    """
    device = torch.device("cpu") if toy else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not toy:
        torch.cuda.set_device(device)  # where FSDP2 gathers
        use_all_channels()
    dist.init_process_group("gloo" if toy else "nccl", timeout=timedelta(minutes=10), device_id=None if toy else device)
    rank, size = dist.get_rank(), dist.get_world_size()
    out = out or Path(f"results/h200/parallel_{size}.json")
    result = read_json(out) if out.exists() else {"toy": toy, "rows": []}
    require(result["toy"] == toy, f"{out} holds {'toy' if result['toy'] else 'real'} sizes: choose another --out.")
    enough = [row for row in result["rows"] if row["outcome"] != "complete" or len(row.get("runs", [0])) >= times]
    done = {(row["work"], row["contestant"], row["ranks"]) for row in enough}
    for work in only or (*WORKS, "all-reduce"):
        entrants = COLLECTIVES if work == "all-reduce" else (*LMCORE, *PEERS)
        chosen = [name for name in (*entrants, *GRAPHS) if name in (contestants or entrants)]
        runs: dict[str, list[dict[str, Any]]] = {}
        for name in [name for name in chosen if (work, name, size) not in done] * times:
            found = all_reduce(name, device, toy) if work == "all-reduce" else steps(work, name, device, toy)
            runs.setdefault(name, []).append(found)
            head = {"work": work, "contestant": name, "ranks": size}
            others = [row for row in result["rows"] if {key: row[key] for key in head} != head]
            nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
            provenance = environment() | {"nccl": nccl}
            row = head | middle(runs[name]) | {"commit": provenance.get("git_commit")}
            result = {"toy": toy, "provenance": provenance, "rows": [*others, row]}
            if rank == 0:
                write_json(out, result)
                print(row, flush=True)
            if name in GRAPHS and found["outcome"] != "complete":
                return
    dist.destroy_process_group()


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median time (of an even number the slower of the two in the middle) with the seconds of all runs; if
    one was not completed, that one."""
    failed = [run for run in runs if run["outcome"] != "complete"]
    if failed or len(runs) == 1:
        return (failed or runs)[0]
    by_time = sorted(runs, key=lambda run: run["seconds"])
    return by_time[len(runs) // 2] | {"runs": [run["seconds"] for run in runs]}


def steps(work: str, name: str, device: torch.device, toy: bool) -> dict[str, Any]:
    """Full training steps of a contestant; times are those of the slowest rank."""
    size, context, rows = ("smoke", 32, 2) if toy else WORKS[work]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = rows // ranks if work.endswith("in all") else rows
    model = model_config(size, vocab_size=300 if toy else 10_000, context_length=context, attention="sdpa")
    config = TrainConfig(
        model, OptimizerConfig(warmup_steps=1), batch_size=rows * ranks, precision="fp32" if toy else "bf16",
        steps=2, device=device.type,
    )  # fmt: skip
    set_matmul_precision(device, config.precision)
    torch.manual_seed(1 + rank)
    batch = torch.randint(model.vocab_size, (2, rows, context), device=device)
    try:
        step = contestant(name, config, device, toy, batch)
        if device.type == "cuda" and name not in GRAPHS:
            # the peak is that of steps, not of what made the model; memory of a graph counts while it is captured
            torch.cuda.reset_peak_memory_stats(device)
        losses = [round(mean(step(*batch)[0]), 5) for _ in range(COMPARED)]
        seconds = timed(lambda: step(*batch), device)
        run = {"outcome": "complete", "losses": losses} | seconds
        if device.type == "cuda" and ranks > 1:
            run["exposed_seconds"] = exposed(lambda: step(*batch), device)
    except (ImportError, Absent) as error:
        return {"outcome": "absent", "reason": str(error)}
    except (RuntimeError, MemoryError) as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        run = {"outcome": "out of memory", "reason": reason}
    counted = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    peaks = [float(counted.get(f"{kind}_bytes.all.peak", 0)) for kind in ("allocated", "requested")]
    most = torch.tensor(peaks, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    peak, requested = (int(number) or None for number in most.tolist())
    step = None
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream, of which none is left
    reset_peak_memory(device)
    if run["outcome"] != "complete":
        return run
    chosen = replace(config, batch_size=rows, **LMCORE.get(name, {}))
    share = None if chosen.strategy == "ddp" or name.endswith("DDP") else ranks
    reason = refusal(bound(chosen, chosen.ops), peak, run["seconds"], device_name(device), share)
    if reason is not None:
        return {"outcome": "failed", "reason": reason}
    tokens, rate = config.tokens_per_step, peak_flops(device_name(device), config.precision)
    flops = training_flops(model, config.batch_size) / run["seconds"]
    return run | {
        "tokens_per_second": tokens / run["seconds"], "peak_bytes": peak, "requested_peak_bytes": requested,
        "mfu": flops / rate / ranks if rate else None,
    }  # fmt: skip


def contestant(
    name: str, config: TrainConfig, device: torch.device, toy: bool, batch: Tensor
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The step of a contestant on this rank, from the weights that all start from; a graph's is that of `batch`."""
    torch.manual_seed(0)
    chosen = replace(config, **LMCORE.get(name, {}))
    model = TransformerLM(chosen.model, device=device)
    if name in LMCORE:
        # compiling a deep model as a whole takes minutes; the explicit step needs no compiler
        compiled = not toy and chosen.strategy != "fsdp" and chosen.model.num_layers <= 12
        chosen = replace(chosen, compile=compiled)
        step, reason = training_step(model, chosen, dist.get_world_size())
        require(reason is None, f"The explicit step does not cover {reason}.")
        return step
    graph = name in GRAPHS
    # gradients are added up on the stream on which DDP was made, which has to be that of the capture
    stream = torch.cuda.Stream(device) if graph and device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        theirs, logits = hugging_face(model)
        del model
        if name.endswith("torch DDP"):
            ids = [device.index] if device.type == "cuda" else None
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(
                theirs, device_ids=ids, gradient_as_bucket_view=True
            )
        else:
            dtype = torch.bfloat16 if config.precision == "bf16" else None
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for layer in theirs.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(theirs, mp_policy=policy)
            wrapped = theirs
        logits = lambda inputs: wrapped(input_ids=inputs, use_cache=False).logits  # noqa: E731
        step = peer_step(theirs, logits, config, device, graph, None if toy else "by layer")
    if not graph:
        return step
    reset_peak_memory(device)
    replay, returned = captured(lambda: step(*batch), device, WARMUPS, stream, "relaxed")
    first = iter(returned[:COMPARED])
    return lambda *_: next(first, None) or replay()


def mean(value: Tensor) -> float:
    """The mean over the ranks."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def timed(function: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Median, least and most seconds of a call, of the slowest rank, in rounds of calls back to back."""

    def once(calls: int) -> float:
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        taken = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float32, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    once(3)
    calls = max(1, round(SECONDS / once(3))) if device.type == "cuda" else 1  # a toy
    rounds = [once(calls) for _ in range(ROUNDS)]
    return {"seconds": statistics.median(rounds), "low": min(rounds), "high": max(rounds), "calls": calls}


def exposed(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call in which NCCL's kernels are all that runs on a GPU, on average over ranks and calls."""
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)  # a call is left out, at the end of which all meet
    with TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule) as profiler:
            function()
            dist.barrier()
            torch.cuda.synchronize(device)
            profiler.step()
            for _ in range(PROFILED):
                function()
            torch.cuda.synchronize(device)
        profiler.export_chrome_trace(f"{folder}/calls.json")
        work = read_torch_trace(f"{folder}/calls.json").work.assign(instance=0)
    message = work["name"].astype(str).str.startswith("nccl")
    alone = occupied(work)["busy"].sum() - occupied(work[~message])["busy"].sum() if message.any() else math.nan
    found = mean(torch.tensor(alone / 1e9 / PROFILED, device=device))
    require(not math.isnan(found), "The record of a rank holds no kernel of NCCL.")
    return found


def all_reduce(name: str, device: torch.device, toy: bool) -> dict[str, Any]:
    """The sum of 1 GiB over the ranks, in registered memory, and its bus bandwidth: the bytes that each link carries,
    2 (N - 1) / N of it."""
    size, ranks = 2**20 if toy else 2**30, dist.get_world_size()
    with registered_memory():
        tensor, buffer = (torch.zeros(elements, device=device) for elements in (size // 4, size // 4 // ranks + 1))
        call = partial(dist.all_reduce if name == "NCCL" else partial(ring_all_reduce, buffer=buffer), tensor)
        found = timed(call, device)
        del tensor, buffer, call
    return {"outcome": "complete", "bus_bytes_per_second": 2 * (ranks - 1) / ranks * size / found["seconds"]} | found


if __name__ == "__main__":
    tyro.cli(main)
