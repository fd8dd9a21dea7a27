"""Runs of several ranks of which one is killed, hangs, fails or lacks memory: all end, and nothing is lost."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from fault_bench import SECONDS, Bench, train_here, wait_until
from parallel_runs import free_port

from lmcore.config import TrainConfig, replace, to_dict
from lmcore.errors import EXIT_CODES, EXIT_USER_ERROR
from lmcore.files import write_json
from lmcore.run import RunFolder

TRIES = 16
"""Of each kind of fault that comes at a random moment."""

STRATEGIES = ("ddp", "zero1", "fsdp", "torch-ddp", "torch-fsdp2")
WITHIN = 60.0
"""Seconds after which a fault must have ended all ranks."""

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)

FAULTS = {
    "hang": (None, "lmcore: The ranks lost each other", 1),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory"), "rank {rank}: CUDA", EXIT_CODES["out of memory"]),
    "full disk": (OSError(errno.ENOSPC, "No space left"), "No space left; the same command resumes", EXIT_USER_ERROR),
    "exception": (RuntimeError("a kernel failed"), "a kernel failed", 1),
}
"""What a rank raises in a step (None: it hangs), what is said then, and the exit code of all."""


@dataclass(frozen=True)
class Rank:
    """Called in a started process: makes it a rank, less patient than usual; one may fail in a step."""

    rank: int
    size: int
    port: int
    fails_at: int | None = None
    how: str = ""

    def __call__(self) -> None:
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(self.rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the latter as the command has it
        from lmcore import train
        from lmcore.distributed import watch, world

        watch.SILENCE, watch.GRACE, watch.PERIOD = 8.0, 1.0, 0.3
        if self.how == "hang":
            world.SECONDS_OF_A_COLLECTIVE = 15
        rate = train.get_lr_cosine_schedule

        def fail(step: int, *settings):
            if step == self.fails_at:
                time.sleep(1000 if FAULTS[self.how][0] is None else 0)
                raise FAULTS[self.how][0]
            return rate(step, *settings)

        train.get_lr_cosine_schedule = fail


def rank_here(config: TrainConfig, folder: Path, log: Path, rank: Rank) -> None:
    """What a started rank does."""
    try:
        train_here(config, folder, log, rank)
    except RuntimeError as error:
        print(f"lmcore: {error}", flush=True)
        sys.exit(1)


class Ranks:
    """Runs of two or three ranks, each held against an undisturbed run of as many that divides the work as it does."""

    def __init__(self, bench: Bench):
        self.bench, self.straight = bench, {}

    def start(self, run: RunFolder, config: TrainConfig, size: int, failing: int = -1, step: int = 0, how="") -> list:
        port, log, processes = free_port(), self.bench.folder / f"{run.name}.log", []
        for rank in range(size):
            made = Rank(rank, size, port, step if rank == failing else None, how)
            processes.append(self.bench.processes.Process(target=rank_here, args=(config, run.path, log, made)))
            processes[-1].start()
        return processes

    def goes_on(self, run: RunFolder, config: TrainConfig, size: int) -> None:
        """The same ranks again end with what an undisturbed run has."""
        if (config, size) not in self.straight:
            self.straight[config, size] = straight = self.bench.new()
            assert codes(self.start(straight, config, size)) == [0] * size, self.bench.said(straight)
        assert codes(self.start(run, config, size)) == [0] * size, self.bench.said(run)
        self.bench.require_same(run, self.straight[config, size])

    def case(self, rng: random.Random) -> tuple[RunFolder, TrainConfig, int]:
        """A run with a random way to divide the work, form of checkpoints and number of ranks."""
        config = replace(self.bench.config, strategy=rng.choice(STRATEGIES), batch_size=6)
        # PyTorch's DDP rebuilds its buckets after a first step: the sums of three ranks then have another order
        size = 2 if config.strategy == "torch-ddp" else rng.choice((2, 2, 3))
        return self.bench.new(), replace(config, checkpoints=rng.choice(("whole", "sharded"))), size

    def under_way(self, rng: random.Random, count: int) -> Iterator[tuple[RunFolder, TrainConfig, list]]:
        """So many random runs with their processes, at a random moment of the training."""
        while count:
            run, config, size = self.case(rng)
            processes = self.start(run, config, size)
            over = lambda: any(process.exitcode is not None for process in processes)  # noqa: B023, E731
            wait_until(lambda: run.metrics_file.exists() or over(), "the ranks train")  # noqa: B023
            time.sleep(rng.uniform(0, 0.4))
            if over() or run.status()["state"] == "complete":
                codes(processes)
                continue
            yield run, config, processes
            count -= 1


def codes(processes: list) -> list[int]:
    """Exit codes of processes, all of which end within `WITHIN` seconds."""
    end = time.monotonic() + WITHIN
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [number for number, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
    assert not late, f"ranks {late} had not ended after {WITHIN:.0f} seconds"
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def ranks(bench: Bench) -> Ranks:
    return Ranks(bench)


def test_a_rank_dies(ranks: Ranks, fault, rng: random.Random, tries):
    for run, config, processes in ranks.under_way(rng, tries(TRIES)):
        victim = rng.randrange(len(processes))
        os.kill(processes[victim].pid, signal.SIGKILL)
        with fault("SIGKILL of one of several ranks"):
            ended, said = codes(processes), ranks.bench.said(run)
            if any(code for rank, code in enumerate(ended) if rank != victim):  # the run may have been over
                assert {1, -signal.SIGKILL, 0} >= set(ended), said
                assert said.count(f"lmcore: Rank {victim} (process {processes[victim].pid} on") == 1, said
                assert said.count("lmcore: Rank") == 1, said
            ranks.goes_on(run, config, len(processes))


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_fails(ranks: Ranks, fault, rng: random.Random, tries, how: str):
    for _ in range(tries(TRIES // 2)):
        run, config, size = ranks.case(rng)
        failing, step = rng.randrange(size), rng.randint(5, config.steps)  # the first steps may take long
        with fault(f"{how} of one of several ranks"):
            _, sentence, code = FAULTS[how]
            ended = codes(ranks.start(run, config, size, failing, step, how))
            said = ranks.bench.said(run)
            assert set(ended) == {code}, (ended, said)
            assert sentence.format(rank=failing) in said, said
            if how == "out of memory":  # a result, which is kept; here the memory is there again
                status = run.status()
                assert status["state"] == "out of memory", status
                assert f"rank {failing}" in status["reason"].lower(), status
                run.status_file.unlink()
            ranks.goes_on(run, config, size)


def test_ranks_are_asked_to_stop(ranks: Ranks, fault, rng: random.Random, tries):
    """By a signal to all of them, or to a single one: all save the same step."""
    for run, config, processes in ranks.under_way(rng, tries(TRIES)):
        with fault("stop signal to one or all of several ranks"):
            for process in rng.choice((processes, [rng.choice(processes)])):
                os.kill(process.pid, signal.SIGTERM)
            ended = codes(processes)
            if run.status()["state"] != "complete":
                assert ended == [EXIT_CODES["interrupted"]] * len(ended), (ended, ranks.bench.said(run))
            ranks.goes_on(run, config, len(ended))


def test_under_torchrun(ranks: Ranks, fault, tmp_path: Path):
    """A rank that is killed is started again with the others; a stop of the launcher saves, and the ranks resume."""
    config = replace(ranks.bench.config, strategy="zero1", checkpoints="sharded", steps=600, checkpoint_interval=40)
    config, run = replace(config, eval_interval=200), ranks.bench.new()
    write_json(tmp_path / "config.json", to_dict(config))
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "--"]
    words += ["lmcore", "train", "--run", str(run.path), "--config", str(tmp_path / "config.json")]
    said = (tmp_path / "log").read_text
    with fault("SIGKILL, SIGTERM under torchrun, to one of several ranks"), open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        wait_until(lambda: run.metrics_file.exists() and len(run.metrics_lines()) > 40, "the ranks train")
        psutil.Process(launcher.pid).children()[1].kill()
        wait_until(lambda: "resuming from step" in said(), "the ranks are started again")
        launcher.terminate()
        launcher.wait(SECONDS)
        assert run.status()["state"] == "interrupted", said()
        ranks.goes_on(run, config, 2)
