"""Runs a course's own tests with lmcore's adapters: `python tests/official.py CHECKOUT [--runs 50] [--record NAME]`.

In a copy: the checkout stays as it is. Assignment 2 has the model of assignment 1 beside its tests. `--record` writes
what came out under this name into results/official.json (`--to`), with digests of the test files. `--leave-out
TEST=REASON` is for a test whose files are not at hand, `--note TEXT` for what stands in their place.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
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


def run(copy: Path, left_out: list[str]) -> tuple[int, dict[str, str], int]:
    """One run of the suite: pytest's exit code, the outcome of each test, and the number of warnings."""
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
    return done.returncode, outcomes, int(warned[1]) if warned else 0


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
    begin, source = time.monotonic(), environment() | {"processor": processor()}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(given.checkout, copy)
        shutil.copy(PROJECT / "tests" / "adapters.py", copy / "tests")
        runs = [run(copy, [*left_out]) for _ in range(given.runs)]
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(copy.glob("tests/*.py"))}
    names = dict.fromkeys(name for _, outcomes, *_ in runs for name in outcomes)
    tests = {name: Counter(outcomes.get(name, "missing") for _, outcomes, *_ in runs) for name in names}
    if given.record:
        found = {
            "runs": given.runs, "runs_that_failed": sum(code != 0 for code, *_ in runs),
            "warnings": sum(warnings for *_, warnings in runs), "tests": tests, "left_out": left_out,
            "note": given.note, "seconds": time.monotonic() - begin, "files": files, "provenance": source,
        }  # fmt: skip
        write_json(given.to, (read_json(given.to) if given.to.exists() else {}) | {given.record: found})
    return int(any(code for code, *_ in runs))


if __name__ == "__main__":
    sys.exit(main())
