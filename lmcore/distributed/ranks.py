"""Ranks on this machine, for a notebook or a test: processes that all run the same function, again and again."""

import contextlib
import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from lmcore.distributed.collectives import use_all_channels
from lmcore.errors import UserError, require, require_positive
from lmcore.files import temporary_folder


class RankError(RuntimeError):
    """A rank failed; the message names it and has its last words."""


class Ranks:
    """`world_size` processes in one process group, on the CPU with gloo or with a GPU each with NCCL.

    `run` calls a function on every rank, also one that was defined in a notebook, and returns what each returned. Use
    it as a context manager, or `close` it; in a script, below `if __name__ == "__main__"`. A rank that fails, dies or
    does not answer within `timeout` seconds ends all of them. Raises `UserError` if there are fewer GPUs than ranks for
    NCCL.
    """

    def __init__(self, world_size: int, backend: str = "gloo", timeout: float = 60.0):
        require_positive("world_size", world_size)
        if backend == "nccl":
            gpus = torch.cuda.device_count()
            require(world_size <= gpus, f"{world_size} ranks need as many GPUs with NCCL, and there are {gpus}.")
        self.world_size, self.timeout = world_size, timeout
        self.held = contextlib.ExitStack()
        folder = self.held.enter_context(temporary_folder("lmcore-ranks-"))
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, backend, str(folder / "store"), timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, *arguments)` returns on each rank, tensors included."""
        require(bool(self.processes), "These ranks have ended: start new ones.")
        call, results = cloudpickle.dumps((function, arguments)), {}
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # of a rank that has ended, as is seen below
                pipe.send_bytes(call)
        end = time.monotonic() + self.timeout
        while len(results) < self.world_size:
            left = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = connection.wait(list(left), max(0.0, end - time.monotonic()))
            late = f"Rank {min(left.values())} has not answered within {self.timeout:g} seconds"
            error = RankError(f"{late}: do all ranks call the same collectives?")
            for pipe in ready:
                rank = left[pipe]
                try:
                    results[rank], error = cloudpickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    error = RankError(f"Rank {rank} has ended with exit code {self.processes[rank].exitcode}")
                if error is not None:
                    break
            if error is not None:
                self.close()
                raise error
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends all ranks."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
        self.held.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def first_ranks(count: int) -> dist.ProcessGroup | None:
    """The group of this process's first `count` ranks; None is that of all. All ranks must call it, at the same place.

    It is made once: each group holds threads and connections, with NCCL also memory of the GPU.
    """
    return None if count == dist.get_world_size() else dist.new_group(range(count))


def use_loopback() -> None:
    """Lets gloo connect ranks of one machine, whose name need not be in any directory."""
    loopback = [name for name in psutil.net_if_addrs() if name.startswith("lo")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0] if loopback else "lo")


def _serve(pipe: connection.Connection, rank: int, size: int, backend: str, store: str, timeout: float) -> None:
    """A rank's life: join the group, then run what comes until the pipe closes."""
    torch.set_num_threads(1)
    if backend == "gloo":
        use_loopback()
    else:
        torch.cuda.set_device(rank)
        use_all_channels()
    patience = timedelta(seconds=timeout)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=size, timeout=patience)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            function, arguments = cloudpickle.loads(pipe.recv_bytes())
            try:
                answer = function(rank, *arguments), None
            except UserError as error:
                answer = None, error
            except Exception as error:
                failed = RankError(f"Rank {rank} failed: {type(error).__name__}: {error}")
                failed.add_note(traceback.format_exc())
                answer = None, failed
            pipe.send_bytes(cloudpickle.dumps(answer))
