"""The ranks of a training run: the processes that torchrun or srun started, and how they agree."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmcore.alone import ALONE, OneRank
from lmcore.config import TrainConfig
from lmcore.distributed import watch as watching
from lmcore.distributed.ranks import use_loopback
from lmcore.distributed.watch import RESUMES, End, Watch, by_other_rank
from lmcore.errors import EXIT_CODES, EXIT_FAILURE, EXIT_USER_ERROR, OutOfMemory, UserError, require
from lmcore.stopping import Stopped

SECONDS_TO_JOIN = 120
"""How long a rank waits for the others to start."""

SECONDS_TO_SAY = 5
"""How long the first rank has for a sentence that concerns all, before the others end."""

SECONDS_OF_A_COLLECTIVE = 900
"""How long a collective may take, a save or the compilation of a step on another rank included; NCCL and gloo then end
the ranks, of which one may hang."""


class World(OneRank):
    """All ranks of a run.

    `rank` of `size` ranks, on the machine's place `local_rank`; `group` is for small values on the CPU, apart from the
    gradients. Rank 0 writes the run folder.
    """

    def __init__(self, rank: int, size: int, local_rank: int, watch: Watch):
        self.rank, self.size, self.local_rank, self.watch = rank, size, local_rank, watch
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS_OF_A_COLLECTIVE))
        self.votes: tuple[dist.Work, Tensor] | None = None

    def device(self, name: str) -> torch.device:
        require(
            name in ("auto", "cuda", "cpu"),
            f"Ranks train on a GPU each or on CPUs: set device to cuda or cpu, not {name!r}.",
        )
        if not on_gpu(name):
            return torch.device("cpu")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: Any) -> list[Any]:
        """What each rank has, on rank 0 alone; an empty list elsewhere."""
        values = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    @contextmanager
    def checked(self) -> Iterator[None]:
        error = None
        try:
            yield
        except UserError as refusal:
            error = refusal
        refused = [rank for rank, wrong in enumerate(self.gather(error is not None)) if wrong]
        if refused and refused[0] == self.rank:
            raise error
        if refused:
            raise SystemExit(EXIT_USER_ERROR)

    def agree(self, stop: bool) -> bool:
        """The answer to this question comes with the next one: nothing waits for it."""
        decided = False
        if self.votes is not None:
            work, vote = self.votes
            work.wait()
            decided = bool(vote.item())
        vote = torch.tensor([stop], dtype=torch.int32)
        self.votes = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.group, async_op=True), vote
        return decided

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=None if tensor.is_cuda else self.group)
        return tensor

    def before_exit(self, call: Callable[[End], Any]) -> None:
        self.watch.before_exit = call


@contextmanager
def joined(config: TrainConfig) -> Iterator[OneRank]:
    """Joins the ranks that a launcher's variables name (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT).

    A process that none started, or a run that is not parallel, has one rank. However the block ends, all
    ranks end: those that wait for one which failed exit with its exit code. Raises `UserError` if ranks are missing,
    have no GPU of their own, the batch does not divide by their number, or the variables make no sense.
    """
    size = launched()[1] if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if config.strategy == "none" and size > 1:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # the first of a machine says it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends all ranks as soon as one has ended
            time.sleep(SECONDS_TO_SAY)
            raise SystemExit(EXIT_USER_ERROR)
        raise UserError(
            f"torchrun started {size} processes, but the run is not parallel: add --strategy ddp, or another one."
        )
    if config.strategy == "none" or "RANK" not in os.environ:
        if config.strategy != "none" and (gpus := torch.cuda.device_count()) > 1:
            started = f"torchrun --nproc-per-node {gpus} -m -- lmcore train ..."
            print(f"This process uses one of {gpus} GPUs; all of them: {started}", file=sys.stderr, flush=True)
        yield ALONE
        return
    world = join(config)
    try:
        yield world
    except BaseException as error:
        leave(world, error)
        raise
    dist.barrier(world.group)
    world.watch.close()
    dist.destroy_process_group()


def on_gpu(device: str) -> bool:
    """Whether ranks with this setting take a GPU each."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def launched() -> list[int]:
    """The launcher's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises `UserError` if they make no sense."""
    numbers: list[int] = []
    for names in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, size = (os.environ.get(name, "") for name in names)
        require(
            rank.isdecimal() and size.isdecimal() and int(rank) < int(size),
            f"{names[0]} is {rank!r} and {names[1]} is {size!r}: ranks are whole numbers from 0 to {names[1]} - 1; "
            "start them with torchrun.",
        )
        numbers += int(rank), int(size)
    return numbers


def join(config: TrainConfig) -> World:
    """Meets the other ranks, and makes the process group of the gradients: NCCL on GPUs, gloo on CPUs."""
    rank, size, local, local_size = launched()
    gpu, wrong = on_gpu(config.device), None
    if config.batch_size % size:
        wrong = f"batch_size ({config.batch_size}) must divide by the number of ranks, {size}."
    elif gpu and (gpus := torch.cuda.device_count()) < local_size:
        wrong = (
            f"{socket.gethostname()} has {gpus} GPUs for {local_size} ranks, and each needs its own: start fewer, or "
            "use --device cpu."
        )
    if wrong and local > 0:  # a machine's first rank says it
        raise SystemExit(EXIT_USER_ERROR)
    require(wrong is None, str(wrong))
    if local_size == size:
        use_loopback()
    if not gpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
    try:
        store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=SECONDS_TO_JOIN))))[0]
        # torchrun's agent keeps its store when it starts the ranks again
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        watch = Watch(dist.PrefixStore("lmcore", store.clone()), rank, size)
        dist.init_process_group(
            "nccl" if gpu else "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size,
            timeout=timedelta(seconds=SECONDS_OF_A_COLLECTIVE), device_id=torch.device("cuda", local) if gpu else None,
        )  # fmt: skip
        watch.look()  # all are there: who are they?
        return World(rank, size, local, watch)
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        said = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"The {size} ranks did not meet at {where} within {SECONDS_TO_JOIN} seconds ({said})."
        ) from error


def leave(world: World, error: BaseException) -> None:
    """Tells the other ranks how this one ends, or ends it with the one that failed."""
    watch, first_line = world.watch, (str(error).splitlines() or [type(error).__name__])[0]
    if by_other_rank(error):
        watch.thread.join(watching.SILENCE + 3 * watching.GRACE)  # if another rank has died, this process ends here
        watch.exit(watch.agreed("failed", EXIT_FAILURE, f"The ranks lost each other ({first_line}): {RESUMES}"))
    for kind, state, code in (
        (OutOfMemory, "out of memory", EXIT_CODES["out of memory"]),
        (Stopped | KeyboardInterrupt, "interrupted", EXIT_CODES["interrupted"]),
        (UserError, "failed", EXIT_USER_ERROR),
        (Exception, "failed", EXIT_FAILURE),
    ):
        if isinstance(error, kind):
            watch.announce(state, code, f"Rank {world.rank}: {first_line}")
            break
    watch.close()
