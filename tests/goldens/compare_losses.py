"""Trains with the code of an earlier commit and with the present code, and compares every number bit for bit.

`python tests/goldens/compare_losses.py [--commit 36acd2f] [--only NAME ...] [--steps 40]`, by hand: it takes some
minutes. Only the command `lmcore` is used, each time in a process of its own, so that modules may move between the
two. Times differ between any two runs and are left out. Exit code 1: there is a difference.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
TIMES = {"seconds", "tokens_per_second", "mfu", "peak_memory_bytes", "crc32"}
"""Fields of a metrics line that no two runs share; the checksum is over all fields."""

MODEL = "--model.vocab-size 512 --model.context-length 32 --model.d-model 32 --model.num-heads 4 --model.d-ff 96"
COMMON = (
    f"{MODEL} --model.num-layers 2 --batch-size 8 --log-interval 1 --eval-interval 10 --checkpoint-interval 10 "
    "--optimizer.warmup-steps 5 --optimizer.learning-rate 1e-2 --device cpu"
)
CASES = {
    "plain": "",
    "epoch": "--sampling epoch --seed 3",
    "tied": "--model.tie-embeddings --optimizer.cosine-steps 30",
    "dropout": "--model.dropout 0.1 --model.norm post",
    "switches": "--model.position sinusoidal --model.ffn silu --model.norm none --model.embedding-init-std 0.02",
    "sdpa": "--model.attention sdpa --model.checkpoint-every 1",
    "flash": "--model.attention flash",
    "muon": "--optimizer.name muon",
    "sgd": "--optimizer.name sgd --optimizer.max-grad-norm None",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "fused": "--ops fused --model.attention flash",
    "fused bf16": "--ops fused --precision bf16 --model.tie-embeddings",
    "fused muon": "--ops fused --optimizer.name muon",
}
"""What is trained, by the options that differ from `COMMON`."""


def lmcore(checkout: Path, *arguments: str) -> str:
    """Runs a command with the code of a checkout; returns what it printed. Ends the script if it fails."""
    variables = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "LMCORE_GIT_COMMIT": "unknown"}
    command = [sys.executable, "-m", "lmcore", *arguments]
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} with {checkout} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def trained(checkout: Path, folder: Path, name: str, steps: int) -> list[dict[str, Any]]:
    """The metrics of a case, without times."""
    data, run = folder / "data", folder / name.replace(" ", "_")
    if not data.exists():
        lmcore(checkout, "data", "prepare", "embedded", "--out", str(data), *["--tokenizer", "bpe:512"],
               *["--num-documents", "300"])  # fmt: skip
    options = [*COMMON.split(), *CASES[name].split(), "--steps", str(steps), "--data", str(data)]
    lmcore(checkout, "train", "--run", str(run), *options)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """In words, where the metrics of two runs are not the same; new fields of a line are no difference."""
    found = [] if len(old) == len(new) else [f"{len(old)} lines then, {len(new)} now"]
    for then, now in zip(old, new, strict=False):
        for key, value in then.items():
            other = now.get(key)
            both_nan = isinstance(value, float) and isinstance(other, float) and math.isnan(value) and math.isnan(other)
            if value != other and not both_nan:
                found.append(f"step {then['step']}, {key}: {value!r} then, {other!r} now")
    return found


def main() -> int:
    """Prints a line for each case; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="36acd2f", help="commit of the earlier code")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="some of the cases")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory(prefix="lmcore-losses-") as folder:
        earlier = Path(folder) / "checkout"
        git = ["git", "-C", str(PROJECT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(earlier), options.commit], check=True)
        try:
            for name in options.only:
                sides = {"then": earlier, "now": PROJECT}
                old, new = (trained(code, Path(folder) / side, name, options.steps) for side, code in sides.items())
                found = differences(old, new)
                different += bool(found)
                said = f"{len(found)} DIFFERENCES, the first: {found[0]}" if found else "the same, bit for bit"
                print(f"{name}: {len(old)} lines to loss {old[-1]['train_loss']:.6f}: {said}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(earlier)], check=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
