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
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
REPEAT_SECONDS = 0.2

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "step-tinystories-256x256": ("step", {"size": "tinystories", "batch_size": 256, "context_length": 256}),
    "step-large-4x1024": ("step", {"size": "large", "batch_size": 4, "context_length": 1024}),
    "attention-128-16384": ("attention", {"head_size": 128, "length": 16384, "heads": 16}),
    "decode-small-1": ("decode", {"size": "small", "prompt_tokens": 32, "new_tokens": 256}),
    "step-tinystories-32x256": ("step", {"size": "tinystories", "batch_size": 32, "context_length": 256}),
}
TOY: dict[str, tuple[str, dict[str, Any]]] = {
    "step-smoke-2x16": ("step", {"size": "smoke", "batch_size": 2, "context_length": 16}),
    "attention-16-32": ("attention", {"head_size": 16, "length": 32, "heads": 2}),
    "decode-smoke-1": ("decode", {"size": "smoke", "prompt_tokens": 4, "new_tokens": 4}),
}


def step(size: str, batch_size: int, context_length: int) -> Callable[[], Any]:
    """A fused training step with clipping, bf16 on a GPU."""
    import torch

    from lmcore.config import model_config
    from lmcore.fused.step import FusedStep
    from lmcore.kernels.adamw import FusedAdamW
    from lmcore.model import TransformerLM

    config = model_config(size, context_length=context_length, vocab_size=10_000)
    model = TransformerLM(config, device=device())
    optimizer = FusedAdamW(model.parameters(), **OPTIMIZER, max_grad_norm=1.0)
    taken = FusedStep(model, optimizer, batch_size, context_length, dtype())
    batch = [torch.randint(config.vocab_size, (batch_size, context_length), device=device()) for _ in range(2)]
    return lambda: taken(*batch)


def attention(head_size: int, length: int, heads: int) -> Callable[[], Any]:
    """Causal attention of one sequence, forward and backward."""
    import torch

    from lmcore.kernels.attention import flash_attention

    q, k, v, do = (torch.randn(1, heads, length, head_size, device=device(), dtype=dtype()) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(flash_attention(q, k, v), (q, k, v), do)


def decode(size: str, prompt_tokens: int, new_tokens: int) -> Callable[[], Any]:
    """Greedy decoding of one sequence with the static cache, the prompt included."""
    import torch

    from lmcore.config import model_config
    from lmcore.fused.decoder import FusedDecoder
    from lmcore.model import TransformerLM

    config = model_config(size, context_length=prompt_tokens + new_tokens, vocab_size=10_000)
    model = TransformerLM(config, device=device())
    decoder = FusedDecoder(model, 1, config.context_length, dtype())
    prompt = torch.randint(config.vocab_size, (1, prompt_tokens)).tolist()

    def run() -> None:
        decoder.place([0], prompt)
        decoder.decode(new_tokens)

    return run


def device() -> str:
    """cuda where there is a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype() -> Any:
    """bfloat16 on a GPU."""
    import torch

    return torch.bfloat16 if device() == "cuda" else torch.float32


def worker() -> None:
    """In a tree's own process: answers each line of JSON with one; {"build": …} makes a case, {"run": n} times it."""
    import time

    import torch

    import lmcore

    answers, sys.stdout = sys.stdout, sys.stderr

    def wait() -> None:
        if device() == "cuda":
            torch.cuda.synchronize()

    run: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        order = json.loads(line)
        if "build" in order:
            kind, settings = order["build"]
            torch.manual_seed(0)
            run = globals()[kind](**settings)
            for _ in range(5):
                run()
            wait()
        began = time.perf_counter()
        for _ in range(order.get("run", 1)):
            run()
        wait()
        seconds = (time.perf_counter() - began) / order.get("run", 1)
        print(json.dumps({"seconds": seconds, "lmcore": lmcore.__file__}), file=answers, flush=True)


class Tree:
    """A checkout and the process that runs its code."""

    def __init__(self, folder: Path):
        variables = os.environ | {"PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "benchmarks" / "trees.py"), "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=folder,
        )  # fmt: skip
        self.folder = folder

    def __call__(self, **order: Any) -> float:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if not Path(answer["lmcore"]).resolve().is_relative_to(self.folder.resolve()):
            raise SystemExit(f"{self.folder} ran the lmcore of {answer['lmcore']}.")
        return answer["seconds"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(case: tuple[str, dict[str, Any]], old: Path, new: Path, rounds: int) -> dict[str, Any]:
    """Median seconds of both trees, and the ratio old / new with the middle half of the rounds' own ratios."""
    trees = {"old": Tree(old), "new": Tree(new)}
    once = {name: tree(build=case) for name, tree in trees.items()}
    calls = max(1, math.ceil(REPEAT_SECONDS / once["old"]))
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(rounds):
        for name in list(trees)[:: -1 if number % 2 else 1]:
            seconds[name].append(trees[name](run=calls))
    for tree in trees.values():
        tree.close()
    ratios = [a / b for a, b in zip(seconds["old"], seconds["new"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    medians = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    return medians | {"ratio": middle, "ratio_low": low, "ratio_high": high, "rounds": rounds, "calls": calls}


def main(old: Path, out: Path, toy: bool, rounds: int, only: list[str]) -> None:
    """Compares every case, prints and writes after each."""
    from lmcore.files import write_json
    from lmcore.provenance import environment

    here = environment()
    result: dict[str, Any] = {"provenance": here, "old": commit(old), "new": here["git_commit"], "cases": {}}
    for name, case in (TOY if toy else CASES).items():
        if only and name not in only:
            continue
        row = result["cases"][name] = {"settings": case[1]} | compare(case, old, HERE, rounds)
        write_json(out, result)
        print(
            f"{name}: old {row['old_seconds'] * 1e3:.3f} ms, new {row['new_seconds'] * 1e3:.3f} ms, old / new "
            f"{row['ratio']:.4f} ({row['ratio_low']:.4f} to {row['ratio_high']:.4f})",
            flush=True,
        )


def commit(folder: Path) -> str | None:
    """The commit of a checkout, or what a file COMMIT in it says where it has no history."""
    said = folder / "COMMIT"
    if said.is_file():
        return said.read_text().strip()
    done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker()
    else:
        import argparse

        sys.path.insert(0, str(HERE))
        options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        options.add_argument("old", type=Path, help="checkout of the version to compare with")
        options.add_argument("--out", type=Path, default=HERE / "results" / "h200" / "trees.json")
        options.add_argument("--toy", action="store_true", help="small sizes, to try the command")
        options.add_argument("--rounds", type=int, default=25)
        options.add_argument("--only", nargs="*", default=[])
        given = options.parse_args()
        main(given.old.resolve(), given.out, given.toy, given.rounds, given.only)
