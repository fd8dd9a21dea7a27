"""Runs a course's own tests with lmcore's adapters: `python tests/official.py CHECKOUT [--runs 50] [--record NAME]`.

In a copy: the checkout stays as it is. Assignment 2 has the model of assignment 1 beside its tests. `--record` writes
what came out under this name into results/official.json (`--to`), with digests of the test files. `--leave-out
TEST=REASON` is for a test whose files are not at hand, `--note TEXT` for what stands in their place.
"""

import argparse
import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch

from lmcore.files import read_json, write_json
from lmcore.provenance import environment

PROJECT = Path(__file__).parents[1]
RECORD = PROJECT / "results" / "official.json"


def processor() -> str:
    """The CPU's name, family and model, and the widest instructions that PyTorch uses on it."""
    file, kept = Path("/proc/cpuinfo"), ("model name", "cpu family", "model")
    told = dict(re.findall(r"^([a-z ]+?)\s*: (.*)$", file.read_text(encoding="utf-8"), re.M)) if file.exists() else {}
    words = [f"{name} {told[name]}" for name in kept if name in told] or [platform.processor()]
    return ", ".join([*words, torch.backends.cpu.get_cpu_capability()])


def halves_differ_by() -> float:
    """By how much a batch's gradients differ from the mean of its halves' at most, in PyTorch alone, on this processor.

    Exact arithmetic gives 0; here it depends on the order in which a processor's matmul adds up the rows. A test that
    wants weights of a data-parallel step to be equal bit by bit to those of one process can only pass where this is 0.
    """
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 100))
    inputs, targets = torch.randn(20, 64), torch.randint(100, (20,))

    def gradients(rows: slice) -> tuple[torch.Tensor, ...]:
        loss = torch.nn.functional.cross_entropy(layers(inputs[rows]), targets[rows])
        return torch.autograd.grad(loss, [*layers.parameters()])

    parts = zip(*map(gradients, (slice(20), slice(10), slice(10, 20))), strict=True)
    return max((whole - (first + second) / 2).abs().max().item() for whole, first, second in parts)


def too_new(copy: Path) -> str:
    """Which file of the checkout this Python cannot read, in a sentence; "" if it can read all."""
    for file in sorted(copy.glob("tests/*.py")):
        try:
            ast.parse(file.read_bytes())
        except SyntaxError as error:
            project = copy / "pyproject.toml"
            settings = tomllib.loads(project.read_text(encoding="utf-8")) if project.exists() else {}
            asked = settings.get("project", {}).get("requires-python", "another version")
            place = f"tests/{file.name}, line {error.lineno}"
            return f"{place}, is no Python {platform.python_version()}: this checkout requires Python {asked}."
    return ""


def run(copy: Path, left_out: list[str]) -> tuple[int, dict[str, str], int, list[str]]:
    """One run of the suite: pytest's exit code, the outcome of each test, the number of warnings and what they say."""
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-p", "no:nbval", "-q", "tests", f"--junitxml={report}"]
    words += ["-k", " and ".join(f"not {name}" for name in left_out)] if left_out else []
    variables = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'cs336-basics'}:{PROJECT}"}
    done = subprocess.run(words, cwd=copy, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    warned = re.search(r"(\d+) warnings?\b.* in ", done.stdout)
    said = re.findall(r"^  (?:.*?/)?([^\s/]+:\d+: \w*Warning: .*)$", done.stdout, re.MULTILINE)
    return done.returncode, outcomes, int(warned[1]) if warned else 0, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--record")
    parser.add_argument("--to", type=Path, default=RECORD)
    parser.add_argument("--leave-out", metavar="TEST=REASON", action="append", default=[])
    parser.add_argument("--note")
    given = parser.parse_args()
    if not given.checkout or not (Path(given.checkout) / "tests").is_dir():
        print("Name a checkout of the course that has tests/: make official A2=path.", file=sys.stderr)
        return 2
    left_out = dict(each.split("=", 1) for each in given.leave_out)
    begin, source = time.monotonic(), environment() | {"processor": processor(), "halves_differ_by": halves_differ_by()}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(given.checkout, copy)
        shutil.copy(PROJECT / "tests" / "adapters.py", copy / "tests")
        if why := too_new(copy):
            print(why, file=sys.stderr)
            return 2
        runs = [run(copy, [*left_out]) for _ in range(given.runs)]
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(copy.glob("tests/*.py"))}
    names = dict.fromkeys(name for _, outcomes, *_ in runs for name in outcomes)
    tests = {name: Counter(outcomes.get(name, "missing") for _, outcomes, *_ in runs) for name in names}
    if given.record:
        found = {
            "runs": given.runs, "runs_that_failed": sum(code != 0 for code, *_ in runs),
            "warnings": sum(warnings for _, _, warnings, _ in runs),
            "warnings_said": Counter(line for *_, said in runs for line in said), "tests": tests,
            "left_out": left_out, "note": given.note, "seconds": time.monotonic() - begin, "files": files,
            "provenance": source,
        }  # fmt: skip
        write_json(given.to, (read_json(given.to) if given.to.exists() else {}) | {given.record: found})
    return int(any(code for code, *_ in runs))


if __name__ == "__main__":
    sys.exit(main())
