"""A task for the tests of the runner, in a module that its processes import faster than one that imports pytest."""

import os
import signal
import time

import torch

from lmcore.config import replace
from lmcore.profiling.cases import workload_config
from lmcore.profiling.workload import Workload

SMALL = workload_config("smoke", context_length=8, vocab_size=32, batch_size=1, device="cpu")

ERRORS = {
    1: torch.OutOfMemoryError("Tried to allocate 7 GiB.\nmore"),
    2: ValueError("a fault in the program\nand more"),
}
ENDS = {3: lambda: os.kill(os.getpid(), signal.SIGKILL), 4: lambda: os._exit(9), 5: lambda: time.sleep(60)}

IMPOSSIBLE = 9
"""The seed of a case whose peak of memory is below that of its weights."""


def measure(config, folder):
    """A task for the tests: what it does depends on the seed."""
    if config.seed in ERRORS:
        raise ERRORS[config.seed]
    ENDS.get(config.seed, int)()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "note.txt").write_text("measured", encoding="utf-8")
    shape = list(Workload(replace(config, device="cpu")).step().shape)
    result = {"pid": os.getpid(), "shape": shape}
    return result | ({"peak_memory_bytes": 1} if config.seed == IMPOSSIBLE else {})


def cases(device="cpu", **seeds):
    return {name: replace(SMALL, seed=seed, device=device) for name, seed in seeds.items()}
