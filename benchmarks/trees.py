"""Two versions of lmcore against each other on one device, in turns: is the new one as fast as the old one?

    git worktree add build/old 36acd2f
    python benchmarks/trees.py build/old             # the checkout that holds this file against build/old

Each tree has a process of its own that builds a case's work and then waits; this process lets them take turns, one
repeat each, the order swapped every round. So whatever the machine does meanwhile falls on both.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from common import command, take_turns, turn_by_turn

HERE = Path(__file__).resolve().parents[1]
REPEAT_SECONDS = 0.2

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "step-tinystories-256x256": ("step", {"size": "tinystories", "batch_size": 256, "context_length": 256}),
    "step-large-4x1024": ("step", {"size": "large", "batch_size": 4, "context_length": 1024}),
    "attention-128-16384": ("attention", {"head_size": 128, "length": 16384, "heads": 16}),
    "decode-small-1": ("decode", {"size": "small", "prompt_tokens": 32, "new_tokens": 256}),
    "step-tinystories-32x256": ("step", {"size": "tinystories", "batch_size": 32, "context_length": 256}),
}
"""What `trees_worker` builds."""
TOY: dict[str, tuple[str, dict[str, Any]]] = {
    "step-smoke-2x16": ("step", {"size": "smoke", "batch_size": 2, "context_length": 16}),
    "attention-16-32": ("attention", {"head_size": 16, "length": 32, "heads": 2}),
    "decode-smoke-1": ("decode", {"size": "smoke", "prompt_tokens": 4, "new_tokens": 4}),
}


class Tree:
    """A checkout, and the process that runs a case with its code."""

    def __init__(self, folder: Path, case: tuple[str, dict[str, Any]]):
        program = [sys.executable, str(HERE / "benchmarks" / "trees_worker.py"), json.dumps(case)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(program, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, **pipes)
        found = self.answer()
        if not Path(found).resolve().is_relative_to(folder.resolve()):
            raise SystemExit(f"{folder} ran the lmcore of {found}.")

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        return json.loads(line) if line else sys.exit("The process of a tree ended; what it said is above.")

    def __call__(self, calls: int) -> float:
        """Seconds of a call."""
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        return self.answer()


def compare(case: tuple[str, dict[str, Any]], old: Path, rounds: int) -> dict[str, Any]:
    """Median seconds of both trees, and the ratio old / new with the middle half of the rounds' own ratios."""
    trees = {"old": Tree(old, case), "new": Tree(HERE, case)}
    calls = max(1, math.ceil(REPEAT_SECONDS / trees["old"](1)))
    seconds = take_turns({name: partial(tree, calls) for name, tree in trees.items()}, rounds, told=True)
    for tree in trees.values():
        tree.process.communicate()
    low, middle, high = statistics.quantiles(turn_by_turn(seconds, "old", "new"), n=4, method="inclusive")
    medians = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    return medians | {"ratio": middle, "ratio_low": low, "ratio_high": high, "rounds": rounds, "calls": calls}


def main(
    old: tyro.conf.Positional[Path],
    out: Path = HERE / "results" / "h200" / "trees.json",
    toy: bool = False,
    rounds: int = 25,
    only: tuple[str, ...] = (),
) -> None:
    """Compares every case, prints and writes after each.

    Args:
        old: checkout of the version to compare with.
        out: the JSON file to write.
        toy: small sizes, to try the command.
        rounds: turns of each tree.
        only: some of the cases, by name.
    """
    from lmcore.files import write_json
    from lmcore.provenance import environment

    old, here = old.resolve(), environment()
    result: dict[str, Any] = {"provenance": here, "old": commit(old), "new": here["git_commit"], "cases": {}}
    for name, case in (TOY if toy else CASES).items():
        if only and name not in only:
            continue
        row = result["cases"][name] = {"settings": case[1]} | compare(case, old, rounds)
        write_json(out, result)
        times = f"old {row['old_seconds'] * 1e3:.3f} ms, new {row['new_seconds'] * 1e3:.3f} ms"
        spread = f"({row['ratio_low']:.4f} to {row['ratio_high']:.4f})"
        print(f"{name}: {times}, old / new {row['ratio']:.4f} {spread}", flush=True)


def commit(folder: Path) -> str | None:
    """The commit of a checkout, or what a file COMMIT in it says where it has no history."""
    if (folder / "COMMIT").is_file():
        return (folder / "COMMIT").read_text().strip()
    done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    command(main)
