"""What every fault is held against: a small run, done once undisturbed, and processes that repeat it."""

import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from parallel_runs import small_config

from lmcore.checkpoint import digest, read_checkpoint, read_weights
from lmcore.config import TrainConfig, replace
from lmcore.distributed.sharded_checkpoint import sharded_reader
from lmcore.errors import EXIT_CODES, EXIT_USER_ERROR, UserError
from lmcore.run import RunFolder

TIMES = {"seconds", "tokens_per_second", "mfu", "peak_memory_bytes"}
"""Fields of a metrics line that no two runs share."""

SECONDS = 120.0
"""Limit of every wait: far more than any of them takes on a busy machine."""


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Waits for a condition that another process or thread brings about; fails saying `what` did not come."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {SECONDS:.0f} seconds"
        time.sleep(0.005)


def ended(process: multiprocessing.Process) -> int:
    """Waits for a process and returns its exit code; one that does not end is killed, and that is a failure."""
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process {process.pid} had not ended after {SECONDS:.0f} seconds and was killed")
    return process.exitcode


class Bench:
    """The run that faults are tried on: its settings, its undisturbed results, and ways to start it."""

    def __init__(self, folder: Path):
        import torch

        from lmcore.data import CorpusConfig, prepare
        from lmcore.train import train

        torch.set_num_threads(1)
        self.folder, self.numbers = folder, itertools.count(1)
        data = prepare("embedded", "bpe:300", folder / "data", CorpusConfig(num_documents=40), progress=False).folder
        model = {"model__num_layers": 1, "model__dropout": 0.1, "batch_size": 4, "steps": 20}
        self.config = small_config(data, **model, log_interval=2, eval_interval=4, eval_batch_size=64)
        self.config = replace(self.config, checkpoint_interval=3, keep_checkpoints=2)
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["lmcore.train"])
        self.straight = RunFolder(folder / "straight")
        train(self.config, self.straight)
        gc.freeze()

    def new(self) -> RunFolder:
        """A run folder that is not there yet."""
        return RunFolder(self.folder / f"run{next(self.numbers)}")

    def copy(self, run: RunFolder) -> RunFolder:
        """A new run folder with the files of another."""
        copied = self.new()
        shutil.copytree(run.path, copied.path)
        return copied

    def start(self, run: RunFolder, prepare: Callable[[], None] | None = None) -> multiprocessing.Process:
        """Trains in a process forked from one that has everything imported; `prepare` is called in it first."""
        run.path.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{run.name}.log"
        process = self.processes.Process(target=train_here, args=(self.config, run.path, log, prepare))
        process.start()
        return process

    def said(self, run: RunFolder) -> str:
        """What the processes of a run printed."""
        return (self.folder / f"{run.name}.log").read_text()

    def finish(self, run: RunFolder) -> str:
        """Trains in this process to the end; returns what was said, a refusal's sentence included."""
        from lmcore.train import train

        said = StringIO()
        with redirect_stdout(said):
            try:
                train(self.config, run)
            except UserError as error:
                print(f"lmcore: {error}")
        return said.getvalue()

    def require_same(self, run: RunFolder, straight: RunFolder | None = None) -> None:
        """Fails unless `run` ended with all that the undisturbed run has, bitwise, but for the times; then removes it.

        The undisturbed run is the bench's own, or `straight`.
        """
        assert run.status()["state"] == "complete", run.status()
        here = results(run)
        for key, value in results(straight or self.straight).items():
            assert here[key] == value, f"{key} of {run.name}: {here[key]}, undisturbed {value}"
        shutil.rmtree(run.path)


def train_here(config: TrainConfig, folder: Path, log: Path, prepare: Callable[[], None] | None) -> None:
    """What a started process does; ends with the exit code of `lmcore train`."""
    import torch

    from lmcore.train import train

    torch.set_num_threads(1)
    gc.freeze()  # what is imported: evaluations collect garbage, which would be most of a small run's life
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if prepare is not None:
        prepare()
    try:
        sys.exit(EXIT_CODES[train(config, folder).state])
    except UserError as error:
        print(f"lmcore: {error}", flush=True)
        sys.exit(EXIT_USER_ERROR)


@dataclass(frozen=True)
class AtSteps:
    """Called in a process: every step takes so many `seconds` more; SIGKILL after step `last`."""

    seconds: float = 0.0
    last: int | None = None

    def __call__(self) -> None:
        from lmcore.train import AsyncMetrics

        push = AsyncMetrics.push

        def push_and_wait(metrics: AsyncMetrics, step: int, *values: Any) -> None:
            push(metrics, step, *values)
            time.sleep(self.seconds)
            if step == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

        AsyncMetrics.push = push_and_wait


def sharded_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """All tensors of a sharded checkpoint, of the model and of the optimizer, whole."""
    import torch
    import torch.distributed.checkpoint as dcp

    reader = sharded_reader(folder)
    known = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in known}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def results(run: RunFolder) -> dict[str, Any]:
    """All that a run is for, times left out."""
    status, newest = run.status(), run.checkpoints()[0]
    state = read_checkpoint(newest)
    if newest.is_dir():
        state |= {"model": sharded_tensors(newest)}
    best, best_notes = read_weights(run.best_weights)
    return {
        "state": status["state"],
        "config": run.config(),
        "losses": (status["valid_loss"], status["best_valid_loss"], status["step"]),
        "last": digest(read_weights(run.last_weights)[0]),
        "best": (digest(best), best_notes),
        "metrics": [{k: v for k, v in line.items() if k not in TIMES} for line in run.metrics_lines()],
        "training state": digest({key: state[key] for key in ("iteration", "model", "optimizer") if key in state}),
        "generators": digest(state["extra"]["rng"]),
        "checkpoints": (newest.name, len(run.checkpoints())),  # a stop saves one more, at a step of its own
        "leftovers": [path.name for path in run.path.rglob("*.tmp")],
    }


def refusal(said: str) -> str:
    """The sentence in which a command refused: one line that ends in a full stop, without a traceback."""
    (sentence,) = [line for line in said.splitlines() if line.startswith("lmcore:")]
    assert sentence.endswith("."), said
    assert "Traceback" not in said
    return sentence
