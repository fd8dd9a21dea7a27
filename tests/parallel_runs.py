"""Processes that train together as torchrun's would, for many short runs: they start once and import PyTorch once."""

import contextlib
import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig, replace
from lmcore.errors import UserError


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def forks() -> multiprocessing.context.BaseContext:
    """Starts processes as forks of one that has imported PyTorch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lmcore.train", "lmcore.distributed.sharded_checkpoint"])
    return context


def small_config(data: str | Path, **changes) -> TrainConfig:
    """Twelve steps of a model that takes a second, with a corpus of a 300-token vocabulary."""
    model = ModelConfig(vocab_size=300, context_length=16, d_model=18, num_layers=2, num_heads=3, d_ff=40)
    config = TrainConfig(
        model, OptimizerConfig(warmup_steps=2, learning_rate=1e-2), str(data), batch_size=12, steps=12, log_interval=3,
        eval_interval=6, eval_batch_size=7, checkpoint_interval=4, keep_checkpoints=5, device="cpu",
    )  # fmt: skip
    return replace(config, **changes)


@dataclass
class Ended:
    """How `train` ended on a rank: a result, what it said with an exit code, or an exception."""

    result: object = None
    code: int = 0
    sentence: str = ""
    printed: str = field(default="", repr=False)


class Trainers:
    """Processes that wait for runs. `train(config, folder, ranks=2)` uses the first two of them."""

    def __init__(self):
        self.workers: list[tuple] = []

    def train(self, config: TrainConfig, folder: Path, ranks: int, own: dict[int, dict] | None = None) -> list[Ended]:
        """What `lmcore.train.train` did on each rank; `own` has changes of single ranks' configurations."""
        context, port = multiprocessing.get_context("spawn"), free_port()
        while len(self.workers) < ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.workers.append((process, ours))
        for rank, (_, pipe) in enumerate(self.workers[:ranks]):
            launched = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pipe.send((replace(config, **(own or {}).get(rank, {})), str(folder), launched))
        try:
            return [pipe.recv() for _, pipe in self.workers[:ranks]]
        except EOFError:  # one has crashed: the next runs get new ones
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        while self.workers:
            self.workers.pop()[0].kill()


def _serve(pipe) -> None:
    import io

    import torch
    import torch.distributed as dist

    from lmcore.train import train

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        config, folder, launched = pipe.recv()
        os.environ |= {name: str(value) for name, value in launched.items()}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            try:
                ended = Ended(train(config, folder))
            except UserError as error:
                ended = Ended(code=2, sentence=str(error))
            except SystemExit as stop:
                ended = Ended(code=stop.code)
            except Exception as error:
                ended = Ended(code=1, sentence=f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
        ended.printed = said.getvalue()
        pipe.send(ended)
        sys.stdout.flush()
