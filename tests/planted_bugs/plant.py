"""Plants the bugs of bugs.yaml one at a time in a copy of the current commit, and says which ones the tests catch.

    python tests/planted_bugs/plant.py                                 # all of them: half an hour on one core
    python tests/planted_bugs/plant.py causal-mask-shows-the-next-token lmcore/fast/kernels --jobs 2
    python tests/planted_bugs/plant.py --nbval                         # those that nbval is to catch in a notebook

The working tree is never touched, and uncommitted changes are not tried. First the named tests must pass unpatched.
Exit code 0 only if every bug was caught.
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import yaml

BUGS_FILE = Path(__file__).with_name("bugs.yaml")
ROOT = Path(__file__).resolve().parents[2]

CAUGHT, NOT_CAUGHT, DOES_NOT_APPLY, ERROR = "caught", "NOT CAUGHT", "does not apply", "ERROR"
"""An error: the tests did not run, as pytest found none, or could not even import them."""

SECONDS = 300
"""A longer run of a bug's tests counts as not caught: in CI it would be a hang that nobody can read."""


@dataclass(frozen=True)
class Bug:
    """One patch: `old`, which stands exactly once in `file`, becomes `new`; one of `tests` must then fail."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    notebook: str | None = None
    """One that nbval must find wrong, too: a cell that fails, or other outputs than the committed ones."""

    def patched(self, text: str) -> str:
        """The file's text with the bug. Raises `ValueError` unless `old` stands there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"`old` stands {found} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a bug, in one of the words above; which test failed or what went wrong; seconds of the tests."""

    bug: Bug
    result: str
    detail: str = ""
    seconds: float = 0.0


def read_bugs(file: Path = BUGS_FILE) -> list[Bug]:
    """The bugs of a list, in order."""
    rows = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [Bug(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def choose(bugs: Sequence[Bug], wanted: Sequence[str]) -> list[Bug]:
    """Bugs by name, or by the beginning of their file's path. Raises `SystemExit` for a word that means none."""
    for word in wanted:
        if not any(word == bug.name or bug.file.startswith(word) for bug in bugs):
            raise SystemExit(f"There is no planted bug {word!r}, and none in a file of that name.")
    return [b for b in bugs if not wanted or any(word == b.name or b.file.startswith(word) for word in wanted)]


FORKS = multiprocessing.get_context("forkserver")
"""Processes begin with the slow imports done, which take longer than most tests; lmcore is not among them."""

PRELOADED = ("__main__", "torch", "torch._dynamo", "pandas", "pytest", "hypothesis", "jaxtyping", "nbformat.v4")


def run_pytest(folder: str, variables: Mapping[str, str], arguments: Sequence[str], log: str) -> None:
    """What a process does: pytest in a copy, with its output in the file `log`; ends with pytest's exit code."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(folder)
    os.environ.update(variables)
    sys.dont_write_bytecode = True
    if "lmcore" in sys.modules:
        raise SystemExit("lmcore was imported before the copy's own could be.")
    sys.path.insert(0, folder)
    import pytest

    raise SystemExit(int(pytest.main([*arguments])))


class Copy:
    """A clone of a commit in a folder of its own, in which tests run the clone's code, also in their subprocesses."""

    def __init__(self, repository: Path, commit: str, folder: Path):
        self.folder = folder
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", repository, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "-q", "--detach", commit], check=True)
        self.variables = {
            "PYTHONPATH": str(folder),  # before an editable installation of the working tree
            "PYTHONDONTWRITEBYTECODE": "1",  # a file patched twice within a second would look compiled already
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder.with_name(f"{folder.name}-hypothesis")),
            "PYTEST_ADDOPTS": "",
        }

    def require_own_code(self) -> None:
        """Raises `SystemExit` if a subprocess that starts elsewhere would import lmcore from another folder."""
        if not (self.folder / "lmcore").is_dir():
            return
        command = [sys.executable, "-c", "import lmcore; print(lmcore.__file__)"]
        variables = os.environ | self.variables
        shown = subprocess.check_output(command, cwd=self.folder.parent, env=variables, text=True).strip()
        if Path(shown).resolve() != (self.folder / "lmcore" / "__init__.py").resolve():
            raise SystemExit(f"Tests in {self.folder} would import {shown}.")

    def pytest(self, tests: Sequence[str], *options: str, timeout: float | None = None) -> tuple[int, str, float]:
        """Exit code, output and seconds of a run of these tests; 124 if it took longer than `timeout` seconds."""
        # addopts may hold options for many workers; a fixed seed makes property-based tests repeat themselves
        arguments = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=no", "-r", "fE", "--hypothesis-seed=0"]
        notebooks = any(test.endswith(".ipynb") for test in tests)
        arguments += ["--nbval-lax", "--nbval-current-env"] if notebooks else ["-p", "no:nbval"]
        arguments += [*options, *tests]
        log, began = self.folder.with_name(f"{self.folder.name}.log"), time.monotonic()
        process = FORKS.Process(target=run_pytest, args=(str(self.folder), self.variables, arguments, str(log)))
        process.start()
        process.join(timeout)
        code = process.exitcode
        if code is None:
            code = 124
            process.kill()
            process.join()
        return code, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - began

    def plant(self, bug: Bug) -> Outcome:
        """Tries one bug, and takes it out again."""
        path = self.folder / bug.file
        try:
            sound = path.read_text(encoding="utf-8")
            path.write_text(bug.patched(sound), encoding="utf-8")
        except (OSError, ValueError) as error:
            return Outcome(bug, DOES_NOT_APPLY, str(error))
        try:
            code, output, seconds = self.pytest(bug.tests, "-x", timeout=SECONDS)
        finally:
            path.write_text(sound, encoding="utf-8")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        results = {0: NOT_CAUGHT, 1: CAUGHT, 124: NOT_CAUGHT}
        words = failed[1] if failed else f"pytest ended with code {code}: {last_line(output)}"
        return Outcome(bug, results.get(code, ERROR), words, seconds)


def last_line(output: str) -> str:
    """The last line that holds anything."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def failures_without_bugs(copies: Sequence[Copy], tests: Sequence[str]) -> list[str]:
    """Sentences on named tests that do not pass as they are; each copy runs a part of them."""
    shares = [share for share in (tests[i :: len(copies)] for i in range(len(copies))) if share]
    with ThreadPoolExecutor(len(shares)) as pool:
        ended = list(pool.map(lambda pair: pair[0].pytest(pair[1]), zip(copies, shares, strict=False)))
    words = []
    for code, output, _ in ended:
        if code:
            words += re.findall(r"^(?:FAILED|ERROR).*", output, re.MULTILINE) or [last_line(output)]
    return words


def plant_all(copies: Sequence[Copy], bugs: Sequence[Bug]) -> list[Outcome]:
    """Tries all bugs, as many at a time as there are copies; prints each as it ends."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def plant(bug: Bug) -> Outcome:
        copy = free.get()
        try:
            outcome = copy.plant(bug)
        finally:
            free.put(copy)
        print(f"{outcome.result:<14}  {outcome.seconds:5.1f} s  {bug.name}  {outcome.detail}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(plant, bugs))


def main(
    arguments: Sequence[str] | None = None,
    root: Path = ROOT,
    bugs_file: Path = BUGS_FILE,
    preloaded: Sequence[str] = PRELOADED,
) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="NAME", help="names of bugs, or files or folders that hold them")
    parser.add_argument("--jobs", type=int, default=1, help="bugs tried at a time")
    parser.add_argument("--commit", default="HEAD", help="commit to try them in")
    parser.add_argument("--skip-check", action="store_true", help="do not run the tests unpatched first")
    parser.add_argument("--nbval", action="store_true", help="bugs with a notebook, to be caught there")
    options = parser.parse_args(arguments)
    bugs = choose(read_bugs(bugs_file), options.wanted)
    if options.nbval:
        bugs = [replace(bug, tests=(bug.notebook,)) for bug in bugs if bug.notebook]
    commit = subprocess.check_output(["git", "-C", root, "rev-parse", options.commit], text=True).strip()
    os.environ["OMP_NUM_THREADS"] = "1"  # before the processes that are forked from import PyTorch, and Triton with it
    if not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py, which here would come too late
    FORKS.set_forkserver_preload(list(preloaded))
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        copies = [Copy(root, commit, Path(folder) / f"copy{i}") for i in range(max(1, min(options.jobs, len(bugs))))]
        copies[0].require_own_code()
        tests = list(dict.fromkeys(test for bug in bugs for test in bug.tests))
        if not options.skip_check:
            print(f"Commit {commit[:12]}: {len(tests)} named tests or files without any bug.", flush=True)
            if words := failures_without_bugs(copies, tests):
                print("\n".join(["These fail unpatched, so nothing can be caught by them:", *words]))
                return 1
        outcomes = plant_all(copies, bugs)
    caught = sum(outcome.result == CAUGHT for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} planted bugs were caught.")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
