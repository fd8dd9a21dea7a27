"""Exercises on several ranks: threads that hand messages on, two gloo processes, and Triton's interpreter in one."""

import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from workbook.exercises.exercise import EXERCISES, executed, places
from workbook.exercises.guard import Refused, guarded

SECONDS_TO_START, SECONDS = 90, 15
"""Time for the two processes to start, and for what they then do: a rank may wait for a message that never comes."""


def on_threads(solution: Callable, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `solution(rank, size, tensor, send, receive)` returns on each rank of a ring.

    The ranks are threads; a message that does not come within three seconds is an error.
    """
    size, boxes = len(tensors), [Queue() for _ in tensors]

    def work(rank: int) -> Tensor:
        def send(x: Tensor) -> None:
            assert x.numel() == tensors[rank].numel() // size, "a message is one chunk of the tensor"
            boxes[(rank + 1) % size].put(x.clone())

        return solution(rank, size, tensors[rank].clone(), send, lambda: boxes[rank].get(timeout=3))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def on_processes(job: Callable, name: str | None, solution: Any, *arguments: Any) -> list[Any]:
    """What `job(solution, *arguments)` returns on each of two gloo processes, guarded as the exercise `name` is.

    They are started once, which takes some seconds, and stay until this process ends.
    """
    if not two_ranks().processes:  # one did not answer the last time
        two_ranks.cache_clear()
    results = two_ranks().run(_guarded, job, name, solution, arguments)
    for error in results:
        if isinstance(error, BaseException):
            raise error
    return results


@functools.cache
def two_ranks() -> Any:
    """Two gloo processes (`lmcore.distributed.Ranks`) that have imported what they need."""
    from lmcore.distributed.ranks import Ranks  # FSDP with it: seconds, which other exercises do not take

    ranks = Ranks(2, timeout=SECONDS_TO_START)
    ranks.run(_guarded, len, None, "", ())
    ranks.timeout = SECONDS
    return ranks


def _guarded(rank: int, job: Callable, name: str | None, solution: Any, arguments: tuple) -> Any:
    """On a rank: what the job returns, or the exception that it raises."""
    try:
        if name is None:
            return job(solution, *arguments)
        own = set().union(*(places(exercise.answer) for exercise in EXERCISES.values())) - places(solution)
        with guarded(EXERCISES[name].avoid, SECONDS - 1, own):
            return job(solution, *arguments)
    except (Refused, Exception) as error:
        return error


def in_triton(launch: Callable, avoid: Sequence[str], kernel: Callable, *arguments: Any) -> Any:
    """What `launch(kernel, *arguments)` returns in another process, where Triton's interpreter runs the kernel.

    `kernel` is a plain function in Triton's language, without `triton.jit`, in which `tl` and `triton` are known; its
    arguments in capitals are `tl.constexpr`. Raises `Refused` where its text calls what is to be avoided, or where
    Triton is not installed.
    """
    if find_spec("triton") is None:
        raise Refused("not checked: Triton is not installed here; it needs Linux on x86-64.")
    source = textwrap.dedent(inspect.getsource(kernel))
    source = source[source.index("def ") :]
    if "raise NotImplementedError" in source:  # Triton's language has no exceptions
        raise NotImplementedError
    for name in avoid:
        if re.search(rf"\b{name}\b", source):
            raise Refused(f"Your code calls {name} of a library, which is what you are to write.")
    return on_processes(_launched, None, launch, source, kernel.__name__, *arguments)[0]


def _launched(launch: Callable, source: str, name: str, *arguments: Any) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    if torch.distributed.get_rank() > 0:
        return None
    head, body = source.split("):", maxsplit=1)
    head = re.sub(r"\b([A-Z]+)(?=[,\s]|$)", r"\1: tl.constexpr", head)
    kernel = executed(f"{head}):{body}", {"triton": triton, "tl": tl}, name)
    return launch(triton.jit(kernel), *arguments)
