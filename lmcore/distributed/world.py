"""The ranks of a training run: the processes that torchrun or srun started, and how they agree."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lmcore.config import TrainConfig
from lmcore.device import select_device
from lmcore.distributed.watch import End, Watch, by_other_rank
from lmcore.errors import EXIT_CODES, EXIT_FAILURE, EXIT_USER_ERROR, UserError, leave_to_first_rank, require
from lmcore.stopping import Stopped

SECONDS_TO_JOIN = 120
"""How long a rank waits for the others to start."""

SECONDS_TO_BEGIN = 60
"""How long it may take beyond that until all can talk. Whoever else listens at the address may never answer."""

SECONDS_OF_A_COLLECTIVE = 900
"""How long a collective may take, a save or the compilation of a step on another rank included."""


class World:
    """All ranks of a run; without arguments a process of its own, where every method does the little that is left.

    `rank` of `size` ranks, on the machine's place `local_rank`; `group` is for small values on the CPU, apart from the
    gradients, and `background` for what goes on beside the training. Rank 0 writes the run folder.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, watch: Watch | None = None):
        self.rank, self.size, self.local_rank, self.watch = rank, size, local_rank, watch
        patience = timedelta(seconds=SECONDS_OF_A_COLLECTIVE)
        self.group, self.background = (
            dist.new_group(backend="gloo", timeout=patience) if watch else None for _ in range(2)
        )
        self.votes: tuple[dist.Work, Tensor] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what the run leaves."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This rank's device. Raises `UserError` where it has none of its own."""
        if self.watch is None:
            return select_device(name)[0]
        if name.startswith("cuda") or (name == "auto" and torch.cuda.is_available()):
            require(name in ("auto", "cuda"), f"Each rank takes a GPU of its own: set device to cuda, not {name!r}.")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
            return device
        require(name in ("auto", "cpu"), f"Ranks train on CUDA GPUs or on CPUs, not on {name!r}.")
        return torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, on all of them."""
        if self.watch is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, which alone calls it. A `UserError` of it ends all."""
        value = None
        with self.checked():
            value = make() if self.is_first else None
        return self.gather(value)[0]

    @contextmanager
    def checked(self) -> Iterator[None]:
        """A block in which what one rank refuses ends all: the first such rank raises its `UserError`, others exit."""
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

    def require_same(self, what: dict[str, Any]) -> None:
        """Raises `UserError` naming the fields in which the ranks differ, which must all have the same."""
        everyone = self.gather(what)
        with self.checked():
            for rank, theirs in enumerate(everyone):
                differing = [f"{key} ({everyone[0].get(key)} on rank 0, {theirs.get(key)} on rank {rank})"
                             for key in everyone[0] if theirs.get(key) != everyone[0][key]]  # fmt: skip
                require(not differing, f"The ranks were started with different settings: {', '.join(differing)}.")

    def stops(self, stop: bool) -> bool:
        """Whether a rank wanted to stop before the last step; to be asked ahead of every step, by all ranks.

        The answer to this question comes with the next one: nothing waits for it.
        """
        if self.watch is None:
            return stop
        decided = self.decided()
        vote = torch.tensor([stop], dtype=torch.int32)
        self.votes = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.group, async_op=True), vote
        return decided

    def decided(self) -> bool:
        """The answer to the last `stops`."""
        if self.votes is None:
            return False
        work, vote = self.votes
        self.votes = None
        work.wait()
        return bool(vote.item())

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place, on the tensor's device."""
        if self.watch is not None:
            dist.all_reduce(tensor, group=None if tensor.is_cuda else self.group)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the ranks, in place."""
        return self.sum(tensor).div_(self.size) if self.watch is not None else tensor

    def arm(self, before_exit: Callable[[End], Any]) -> None:
        """What is to be done before the watch ends this process."""
        if self.watch is not None:
            self.watch.before_exit = before_exit

    def beat(self, step: int, patient: bool = False) -> None:
        """This rank has begun a step, which may take long if the others are to be `patient`."""
        if self.watch is not None:
            self.watch.beat(step, patient)

    def patience(self) -> AbstractContextManager[None]:
        """A block that may take long on one rank."""
        return nullcontext() if self.watch is None else self.watch.patience()


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """Joins the ranks that a launcher's variables name (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    A process that none started, or a run that is not parallel, is a `World` of its own. However the block ends, all
    ranks end: those that wait for one which failed exit with its exit code. Raises `UserError` if ranks are missing,
    have no GPU of their own, or the batch does not divide by their number.
    """
    if config.parallel == "none":
        if "TORCHELASTIC_RUN_ID" in os.environ and (size := launched("WORLD_SIZE", 1)) > 1:
            leave_to_first_rank()
            raise UserError(
                f"torchrun started {size} processes, but the run is not parallel: add --parallel ddp, or another way."
            )
        yield World()
        return
    if "RANK" not in os.environ:
        if (gpus := torch.cuda.device_count()) > 1:
            started = f"torchrun --nproc-per-node {gpus} -m -- lmcore train ..."
            print(f"This process uses one of {gpus} GPUs; all of them: {started}", file=sys.stderr, flush=True)
        yield World()
        return
    size, rank, local = launched("WORLD_SIZE", 1), launched("RANK"), launched("LOCAL_RANK")
    require(rank < size, f"RANK is {rank} of WORLD_SIZE {size}: start the ranks with torchrun.")
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    check_ranks(config, size, local)
    try:
        with ending_after(SECONDS_TO_JOIN + SECONDS_TO_BEGIN, f"Rank {rank} of {size} was not answered at {where}."):
            store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=SECONDS_TO_JOIN))))[0]
            # torchrun's agent keeps its store when it starts the ranks again
            store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            watch = Watch(dist.PrefixStore("lmcore", store.clone()), rank, size)
            begin_group(store, rank, size, local, config)
            world = World(rank, size, local, watch)
            watch.meet()
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise UserError(reason_not_joined(error, where, size)) from error
    try:
        yield world
    except BaseException as error:
        leave(world, error)
        raise
    dist.barrier(world.group)
    watch.close()
    dist.destroy_process_group()


def launched(name: str, least: int = 0) -> int:
    """The number in a launcher's variable, `least` without it. Raises `UserError` for anything else."""
    text = os.environ.get(name, str(least))
    whole = text.isascii() and text.isdecimal() and int(text) >= least
    advice = "start the ranks with torchrun, or unset it"
    require(whole, f"The variable {name} must be a whole number of at least {least}, not {text!r}: {advice}.")
    return int(text)


@contextmanager
def ending_after(seconds: float, sentence: str) -> Iterator[None]:
    """A block after so many seconds of which the process ends with the sentence, and as after a mistake of the user's:
    what waits inside PyTorch hears neither exceptions nor signals."""

    def end() -> None:
        print(f"lmcore: {sentence}", file=sys.stderr, flush=True)
        os._exit(EXIT_USER_ERROR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_ranks(config: TrainConfig, size: int, local: int) -> None:
    """Raises `UserError` for numbers of ranks that cannot train; said by a machine's first rank."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wants_gpu = config.device.startswith("cuda") or (config.device == "auto" and gpus > 0)
    local_size = launched("LOCAL_WORLD_SIZE") or local + 1
    faults = {
        f"batch_size ({config.batch_size}) must divide by the number of ranks, {size}.": config.batch_size % size,
        f"{socket.gethostname()} has {gpus} GPUs for {local_size} ranks, and each needs its own: start fewer, or use "
        "--device cpu.": wants_gpu and local_size > gpus,
    }  # fmt: skip
    for sentence, fault in faults.items():
        if fault and local > 0:
            raise SystemExit(EXIT_USER_ERROR)
        require(not fault, sentence)


def begin_group(store: dist.Store, rank: int, size: int, local: int, config: TrainConfig) -> None:
    """The process group of the gradients: NCCL on GPUs, gloo on CPUs."""
    if launched("LOCAL_WORLD_SIZE") == size:  # one machine: its name need not be in any directory
        loopback = [name for name in psutil.net_if_addrs() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0] if loopback else "lo")
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    if not on_gpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // (launched("LOCAL_WORLD_SIZE") or size)))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=SECONDS_OF_A_COLLECTIVE),
        device_id=torch.device("cuda", local) if on_gpu else None,
    )  # fmt: skip


def reason_not_joined(error: Exception, where: str, size: int) -> str:
    """Why the ranks did not find each other, in one sentence."""
    said = str(error).splitlines()[0]
    if "EADDRINUSE" in str(error):
        return f"The port of {where} is in use: choose another MASTER_PORT (torchrun --master-port)."
    if "environment variable" in said:
        return f"The launcher's variables are incomplete ({said.rstrip('.')}): start the ranks with torchrun."
    if isinstance(error, dist.DistError | TimeoutError):
        return f"Not all of {size} ranks met at {where} within {SECONDS_TO_JOIN} seconds ({said.rstrip('.')})."
    return f"The {size} ranks that meet at {where} could not form a group ({said.rstrip('.')})."


def leave(world: World, error: BaseException) -> None:
    """Tells the other ranks how this one ends, or ends it with the one that failed."""
    watch = world.watch
    if not isinstance(error, (UserError, SystemExit, KeyboardInterrupt)) and by_other_rank(error):
        end = watch.explanation()
        watch.exit(
            end or End(-1, "failed", EXIT_FAILURE, f"The ranks lost each other: {str(error).splitlines()[0]}", False)
        )
    if isinstance(error, Stopped):
        watch.announce("interrupted", EXIT_CODES["interrupted"], "stopped")
    elif isinstance(error, KeyboardInterrupt):
        watch.announce("interrupted", EXIT_FAILURE, "stopped")
    elif isinstance(error, Exception):
        code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        watch.announce("failed", code, f"Rank {world.rank}: {first_line}")
    watch.close()
