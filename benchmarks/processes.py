"""A training run as its user waits for it: the command, in a process of its own, with caches that are warm."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_cases import OURS, BenchmarkCase, Conditions, Rows, blank_row

from lmcore.data import CorpusConfig, prepare

REPEATS = 3
"""After a first run of a few steps, which fills the caches of compilers and of files."""


def measure(case: BenchmarkCase, conditions: Conditions) -> Rows:
    """Wall-clock time of `lmcore train --preset handout` from its start to its end, or to its first line of metrics.

    The text is the embedded stories, byte by byte: 6.8 million tokens, and 0.7 million for each of 8 evaluations.
    """
    settings, taken = case.settings, []
    options = ["--preset", "handout", "--device", conditions.device, "--model.vocab-size", "50257"]
    if conditions.toy:
        options = ["--preset", "smoke", "--device", conditions.device]
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(
            "embedded", "bpe:257", f"{folder}/data", CorpusConfig(num_documents=100 if conditions.toy else 20_000)
        )
        options += ["--data", str(data.folder)]
        for number in range(1 + (1 if conditions.toy else REPEATS)):
            run, steps = Path(folder, f"run{number}"), 20 if number == 0 or conditions.toy else settings["steps"]
            command = [sys.executable, "-m", "lmcore", "train", *options, "--run", str(run), "--steps", str(steps)]
            taken.append(seconds(command, run if settings["until"] == "first line" else None))
    row = blank_row(case, OURS, "complete", None)
    row |= {"median": statistics.median(taken[1:]) * 1e3, "low": min(taken[1:]) * 1e3, "high": max(taken[1:]) * 1e3}
    return [row | {"repeats": len(taken) - 1}]


def seconds(command: list[str], run: Path | None) -> float:
    """How long the command takes; with `run`, until the run's first line of metrics is there, when it is ended."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = None if run is None else run / "metrics.jsonl"
    while process.poll() is None and not (metrics is not None and metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    took, ended = time.perf_counter() - began, process.poll()
    if metrics is not None and ended is None:
        process.kill()
    if process.wait() and ended is not None:
        raise RuntimeError(f"{' '.join(command[1:])} ended with exit code {ended}.")
    return took
