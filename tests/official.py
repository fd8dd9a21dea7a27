"""Runs a course's own tests with lmcore's adapters: `python tests/official.py CHECKOUT [--runs 50] [--record NAME]`.

In a copy: the checkout stays as it is. Assignment 2 has the model of assignment 1 beside its tests. `--record` writes
what came out under this name into results/official.json (`--to`), with digests of the test files.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from lmcore.files import read_json, write_json
from lmcore.provenance import environment

PROJECT = Path(__file__).parents[1]
RECORD = PROJECT / "results" / "official.json"


def run(copy: Path) -> tuple[int, dict[str, str], int, list[str]]:
    """One run of the suite: pytest's exit code, the outcome of each test, the number of warnings and what they say."""
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-p", "no:nbval", "-q", "tests", f"--junitxml={report}"]
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
    given = parser.parse_args()
    if not given.checkout or not (Path(given.checkout) / "tests").is_dir():
        print("Name a checkout of the course that has tests/: make official A2=path.", file=sys.stderr)
        return 2
    begin, source = time.monotonic(), environment()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(given.checkout, copy)
        shutil.copy(PROJECT / "tests" / "adapters.py", copy / "tests")
        runs = [run(copy) for _ in range(given.runs)]
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(copy.glob("tests/*.py"))}
    names = dict.fromkeys(name for _, outcomes, *_ in runs for name in outcomes)
    tests = {name: Counter(outcomes.get(name, "missing") for _, outcomes, *_ in runs) for name in names}
    if given.record:
        found = {
            "runs": given.runs, "runs_that_failed": sum(code != 0 for code, *_ in runs),
            "warnings": sum(warnings for _, _, warnings, _ in runs),
            "warnings_said": Counter(line for *_, said in runs for line in said), "tests": tests,
            "seconds": time.monotonic() - begin, "files": files, "provenance": source,
        }  # fmt: skip
        write_json(given.to, (read_json(given.to) if given.to.exists() else {}) | {given.record: found})
    return int(any(code for code, *_ in runs))


if __name__ == "__main__":
    sys.exit(main())
