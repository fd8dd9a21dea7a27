"""Two versions of lmcore against each other on one device, in turns: is the new one as fast as the old one?

    git worktree add build/old 36acd2f
    python benchmarks/trees.py build/old             # the checkout that holds this file against build/old

Each tree has a process of its own that builds a case's work and then waits (this file, with a case in the place of the
checkout); the first process lets them take turns, one repeat each, the order swapped every round. So whatever the
machine does meanwhile falls on both.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import tyro

HERE, CASE = Path(__file__).resolve().parents[1], "--case"
if CASE not in sys.argv:  # the process of a tree has that tree's lmcore
    sys.path.insert(0, str(HERE))

import lmcore  # noqa: E402
from lmcore.config import model_config  # noqa: E402
from lmcore.model import TransformerLM  # noqa: E402
from lmcore.provenance import git_state  # noqa: E402

NEW = (Path(lmcore.__file__).parent / "fast").is_dir()
"""Whether this tree's fast path is one package; before, it was two."""
FUSED, KERNELS = ("lmcore.fast", "lmcore.fast.kernels") if NEW else ("lmcore.fused", "lmcore.kernels")

REPEAT_SECONDS = 0.2

CASES: dict[str, dict[str, Any]] = {
    "step-tinystories-256x256": {"size": "tinystories", "batch_size": 256, "context_length": 256},
    "step-large-4x1024": {"size": "large", "batch_size": 4, "context_length": 1024},
    "attention-128-16384": {"head_size": 128, "length": 16384, "heads": 16},
    "decode-small-1": {"size": "small", "prompt_tokens": 32, "new_tokens": 256},
}
"""Arguments of the function that a name begins with."""
TOY: dict[str, dict[str, Any]] = {"attention-16-32": {"head_size": 16, "length": 32, "heads": 2}}


def main(
    old: tyro.conf.Positional[Path],
    out: Path = HERE / "results" / "h200" / "trees.json",
    toy: bool = False,
    rounds: int = 25,
) -> None:
    """Compares every case, prints and writes after each.

    Args:
        old: checkout of the version to compare with.
        out: the JSON file to write.
        toy: small sizes, to try the command.
        rounds: turns of each tree.
    """
    from lmcore.files import write_json
    from lmcore.provenance import environment

    result: dict[str, Any] = {"provenance": environment(), "cases": {}}
    for name, settings in (TOY if toy else CASES).items():
        row = result["cases"][name] = {"settings": settings} | compare(name, settings, old.resolve(), rounds)
        write_json(out, result)
        times = f"old {row['old_seconds'] * 1e3:.3f} ms, new {row['new_seconds'] * 1e3:.3f} ms"
        spread = f"({row['ratio_low']:.4f} to {row['ratio_high']:.4f})"
        print(f"{name}: {times}, old / new {row['ratio']:.4f} {spread}", flush=True)


def compare(name: str, settings: dict[str, Any], old: Path, rounds: int) -> dict[str, Any]:
    """Median seconds of both trees, and the ratio old / new with the middle half of the rounds' own ratios."""
    trees = {"old": Tree(old, name, settings), "new": Tree(HERE, name, settings)}
    calls = max(1, math.ceil(REPEAT_SECONDS / trees["old"](1)))
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    for number in range(rounds):
        for tree in list(trees)[:: -1 if number % 2 else 1]:
            seconds[tree].append(trees[tree](calls))
    for tree in trees.values():
        tree.process.communicate()
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    medians = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    commits = {f"{name}_commit": tree.commit for name, tree in trees.items()}
    return commits | medians | {"ratio": middle, "ratio_low": low, "ratio_high": high, "rounds": rounds, "calls": calls}


class Tree:
    """A checkout, and the process that runs a case with its code."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]):
        program = [sys.executable, __file__, CASE, name, json.dumps(settings)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(program, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, **pipes)
        found, self.commit = self.answer()
        if not Path(found).resolve().is_relative_to(folder):
            sys.exit(f"{folder} ran the lmcore of {found}.")

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        return json.loads(line) if line else sys.exit("The process of a tree ended; what it said is above.")

    def __call__(self, calls: int) -> float:
        """Seconds of a call."""
        print(calls, file=self.process.stdin, flush=True)
        return self.answer()


# In the process of a tree, with that tree's lmcore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def step(size: str, batch_size: int, context_length: int) -> Callable[[], Any]:
    """A fused training step with clipping, bf16 on a GPU."""
    config = model_config(size, context_length=context_length, vocab_size=10_000)
    model = TransformerLM(config, device=DEVICE)
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}
    optimizer = import_module(f"{KERNELS}.adamw").FusedAdamW(model.parameters(), **settings)
    taken = import_module(f"{FUSED}.step").FusedStep(model, optimizer, batch_size, context_length, DTYPE)
    batch = [torch.randint(config.vocab_size, (batch_size, context_length), device=DEVICE) for _ in range(2)]
    return lambda: taken(*batch)


def attention(head_size: int, length: int, heads: int) -> Callable[[], Any]:
    """Causal attention of one sequence, forward and backward."""
    flash_attention = import_module(f"{KERNELS}.attention").flash_attention
    q, k, v, do = (torch.randn(1, heads, length, head_size, device=DEVICE, dtype=DTYPE) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(flash_attention(q, k, v), (q, k, v), do)


def decode(size: str, prompt_tokens: int, new_tokens: int) -> Callable[[], Any]:
    """Greedy decoding of one sequence with the static cache, the prompt included."""
    config = model_config(size, context_length=prompt_tokens + new_tokens, vocab_size=10_000)
    decoder = import_module(f"{FUSED}.decoder").FusedDecoder(
        TransformerLM(config, device=DEVICE), 1, config.context_length, DTYPE
    )
    prompt = torch.randint(config.vocab_size, (1, prompt_tokens)).tolist()
    return lambda: (decoder.place([0], prompt), decoder.decode(new_tokens))


def serve(name: str, settings: str) -> None:
    """Builds a case; says whose lmcore this is and its commit; answers each number of calls with the seconds of one."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.manual_seed(0)
    run = globals()[name.partition("-")[0]](**json.loads(settings))

    def timed(calls: int) -> float:
        began = perf_counter()
        for _ in range(calls):
            run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return (perf_counter() - began) / calls

    timed(5)
    print(json.dumps([lmcore.__file__, git_state()["git_commit"]]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [CASE]:
        serve(*sys.argv[2:])
    else:
        tyro.cli(main)
