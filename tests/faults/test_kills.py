"""Signals at random moments of training, and SIGKILL before every kind of operation on the run's files."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_bench import SECONDS, Bench, ended, wait_until

from lmcore.config import to_dict
from lmcore.errors import EXIT_INTERRUPTED
from lmcore.files import SECONDS_TO_HOLD, write_json
from lmcore.run import RunFolder


@pytest.mark.parametrize(("number", "count"), [(signal.SIGKILL, 100), (signal.SIGUSR1, 24), (signal.SIGTERM, 24)])
def test_random_moments(bench: Bench, fault, rng, tries, number: signal.Signals, count: int):
    """Each run meets up to three signals; after each a copy of it resumes to its end without another."""
    run, began = bench.new(), time.perf_counter()
    process = bench.start(run)
    wait_until(run.status_file.exists, "the process trains")
    start = time.perf_counter() - began
    assert ended(process) == 0, bench.said(run)
    training = time.perf_counter() - began - start
    hit = 0
    while hit < tries(count):
        run = bench.new()
        for _ in range(rng.choice((1, 1, 2, 3))):
            process = bench.start(run)
            if rng.random() < 0.8:
                wait_until(lambda: trains(process, run) or process.exitcode is not None, "the process trains")  # noqa: B023
                time.sleep(rng.uniform(0, training))
            else:
                time.sleep(rng.uniform(0, start))
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
            code = ended(process)
            if code == 0:
                break  # it had ended before
            moment = "while it starts"
            if trains(process, run) or code == EXIT_INTERRUPTED:
                hit += 1  # the others are extra
                moment = "in the middle of a save" if list(run.path.rglob("*.tmp")) else "of training"
                assert code in (-number, EXIT_INTERRUPTED), bench.said(run)
            with fault(f"{number.name} at a random moment {moment}"):
                rest = bench.copy(run)
                time.sleep(SECONDS_TO_HOLD)  # then what the killed process left is removed
                said = bench.finish(rest)
                assert not said.startswith("lmcore:"), said
                bench.require_same(rest)


def trains(process, run: RunFolder) -> bool:
    """Whether the process has begun to take steps; it may have ended since."""
    return run.status().get("pid") == process.pid or run.status()["state"] == "complete"


WORDS = {
    "open": "a file is opened",
    "fsync": "an fsync",
    "rename": "a rename",
    "remove": "a removal",
    "mkdir": "a folder is made",
}
SAME = 3
"""Of each kind of operation on each kind of file, so many are tried."""


@dataclass
class Operations:
    """Called in a process: says what it does to files below `folder`; SIGKILL before number `victim`."""

    folder: Path
    victim: int | None = None
    count: int = 0

    def __call__(self) -> None:
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            self.happens("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        os.fsync = fsync
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR):
                self.happens("open", os.fsdecode(arguments[0]))
        elif event in ("os.rename", "os.remove", "os.mkdir"):
            self.happens(event.removeprefix("os."), os.fsdecode(arguments[0]))

    def happens(self, what: str, path: str) -> None:
        if not path.startswith(f"{self.folder}/"):
            return
        self.count += 1
        temporary = path.endswith(".tmp")
        print("operation", what, Path(path.rsplit(".", 2)[0] if temporary else path).suffix or "folder", flush=True)
        if self.count == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)


def test_every_operation_on_a_file(bench: Bench, fault, rng: random.Random, tries):
    run = bench.new()
    assert ended(bench.start(run, Operations(run.path))) == 0, bench.said(run)
    done = [line.split()[1:] for line in bench.said(run).splitlines() if line.startswith("operation")]
    numbers = defaultdict(list)
    for number, (what, suffix) in enumerate(done, 1):
        numbers[what, suffix].append((number, what))
    assert {what for what, _ in numbers} == {*WORDS}
    assert {suffix for _, suffix in numbers} >= {".json", ".jsonl", ".pt", ".safetensors"}
    victims = [victim for same in numbers.values() for victim in rng.sample(same, min(SAME, len(same)))]
    for number, what in rng.sample(victims, tries(len(victims))):
        run = bench.new()
        with fault(f"SIGKILL just before {WORDS[what]}"):
            assert ended(bench.start(run, Operations(run.path, number))) == -signal.SIGKILL, bench.said(run)
            time.sleep(SECONDS_TO_HOLD)
            said = bench.finish(run)
            assert not said.startswith("lmcore:"), said
            bench.require_same(run)


def test_a_command_stopped_while_it_starts(bench: Bench, fault, tmp_path):
    """The signal comes while torch is imported, long before training."""
    run, file = bench.new(), tmp_path / "config.json"
    write_json(file, to_dict(bench.config))
    with fault("SIGUSR1 while the command starts"):
        command = [sys.executable, "-X", "importtime", "-m", "lmcore", "train", "--config", file, "--run", run.path]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        next(line for line in child.stderr if line.rstrip().endswith("torch.types"))
        child.send_signal(signal.SIGUSR1)
        said, _ = child.communicate(timeout=SECONDS)
        assert child.returncode == EXIT_INTERRUPTED
        assert "stopped; the same command resumes" in said
        bench.finish(run)
        bench.require_same(run)
