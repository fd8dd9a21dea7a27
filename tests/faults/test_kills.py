"""SIGKILL: at random moments of training, and at every kind of operation on the run's files."""

import json
import multiprocessing
import random
import signal
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

from fault_bench import Bench, Tally, ended, wait_until
from file_faults import Operations

from lmcore.files import SECONDS_TO_HOLD
from lmcore.run import RunFolder

RANDOM_KILLS = 100
WRITES_OF_A_FILE = 3
"""A checkpoint is written in hundreds of pieces: so many of them are tried for each file."""


def test_random_moments(bench: Bench, tally: Tally, rng: random.Random, tries):
    """Each run is killed up to three times; after each kill a copy of it goes on to the end without another."""
    life, steps_begin = min(timed(bench) for _ in range(3))
    killed = 0
    while killed < tries(RANDOM_KILLS):
        run = bench.new()
        for _ in range(rng.choice((1, 1, 2, 3))):
            process = bench.start(run)
            if killed % 5:
                wait_until(partial(trains_or_ended, process, run), "the process trains")
                time.sleep(rng.uniform(0, life - steps_begin))
            else:
                time.sleep(rng.uniform(0, life))
            process.kill()
            if ended(process) != -signal.SIGKILL:
                break  # it had ended before
            killed += trains(process, run)  # the others are extra
            with tally.fault(f"SIGKILL at a random moment {moment(process, run)}"):
                rest = bench.copy(run)
                time.sleep(SECONDS_TO_HOLD)
                said = bench.finish(rest)
                assert not said.startswith("lmcore:"), said
                bench.require_same(rest)
                bench.forget(rest)
        bench.forget(run)


def trains(process: multiprocessing.Process, run: RunFolder) -> bool:
    """Whether the process has begun to take steps; it may have ended since."""
    return run.status().get("pid") == process.pid or run.status()["state"] == "complete"


def trains_or_ended(process: multiprocessing.Process, run: RunFolder) -> bool:
    """Whether there is nothing more to wait for."""
    return process.exitcode is not None or trains(process, run)


def moment(process: multiprocessing.Process, run: RunFolder) -> str:
    """What a process was doing when it was killed, as far as its files tell."""
    if not trains(process, run):
        return "while it starts"
    return "in the middle of a save" if list(run.path.rglob("*.tmp")) else "of training"


def timed(bench: Bench) -> tuple[float, float]:
    """Seconds that an undisturbed process lives, and after which of them it takes its first step."""
    run, started = bench.new(), time.perf_counter()
    process = bench.start(run)
    wait_until(run.status_file.exists, "the process trains")
    steps_begin = time.perf_counter() - started
    assert ended(process) == 0, bench.said(run)
    bench.require_same(run)
    return time.perf_counter() - started, steps_begin


def test_every_operation_on_a_file(bench: Bench, tally: Tally, rng: random.Random, tries):
    recorded, record = bench.new(), bench.folder / "operations.jsonl"
    process = bench.start(recorded, Operations(recorded.path, record=record))
    assert ended(process) == 0, bench.said(recorded)
    bench.require_same(recorded)
    operations = [tuple(json.loads(line)) for line in record.read_text().splitlines()]
    numbers = chosen(operations, rng)
    for number in rng.sample(numbers, tries(len(numbers))):
        what, name = operations[number - 1]
        kind = "SIGKILL in the middle of a write" if what == "write" else f"SIGKILL just before {WORDS[what]}"
        run = bench.new()
        with tally.fault(kind):
            process = bench.start(run, Operations(run.path, victim=number))
            assert ended(process) == -signal.SIGKILL, f"{what} {name}: {bench.said(run)}"
            time.sleep(SECONDS_TO_HOLD)
            said = bench.finish(run)
            assert not said.startswith("lmcore:"), said
            bench.require_same(run)
            bench.forget(run)


WORDS = {
    "open": "a file is opened",
    "fsync": "an fsync",
    "rename": "a rename",
    "remove": "a removal",
    "mkdir": "a folder is made",
}


def chosen(operations: list[tuple[str, str]], rng: random.Random) -> list[int]:
    """Numbers, from 1, of the operations to die at: each kind of each file, of the many pieces of a file a few."""
    numbers = defaultdict(list)
    for number, operation in enumerate(operations, 1):
        numbers[operation].append(number)
    some = []
    for same in numbers.values():
        few = len(same) <= WRITES_OF_A_FILE
        some += same if few else [same[0], same[-1], *rng.sample(same[1:-1], WRITES_OF_A_FILE - 2)]
    assert {Path(name).suffix for _, name in numbers} >= {".json", ".jsonl", ".pt", ".safetensors"}
    assert {what for what, _ in numbers} == {"write", *WORDS}
    return sorted(some)
