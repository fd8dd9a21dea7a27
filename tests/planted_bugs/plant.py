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


def read_bugs(file: Path = BUGS_FILE) -> list[Bug]:
    """The bugs of a list, in order."""
    rows = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [Bug(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def choose(bugs: Sequence[Bug], wanted: Sequence[str]) -> list[Bug]:
    """Bugs by name, or by the beginning of their file's path. Raises `SystemExit` for a word that means none."""
    chosen = {word: [bug for bug in bugs if word == bug.name or bug.file.startswith(word)] for word in wanted}
    if unknown := [word for word in wanted if not chosen[word]]:
        raise SystemExit(f"There is no planted bug {unknown[0]!r}, and none in a file of that name.")
    return [bug for found in chosen.values() for bug in found] if wanted else [*bugs]


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
    """A clone of the commit in a folder of its own, in which tests run the clone's code, also in their subprocesses."""

    def __init__(self, repository: Path, folder: Path):
        self.folder = folder
        subprocess.run(["git", "clone", "-q", "--shared", repository, folder], check=True)
        self.variables = {
            "PYTHONPATH": str(folder),  # before an editable installation of the working tree
            "PYTHONDONTWRITEBYTECODE": "1",  # a file patched twice within a second would look compiled already
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder.with_name(f"{folder.name}-hypothesis")),
            "PYTEST_ADDOPTS": "",
        }

    def pytest(self, tests: Sequence[str], *options: str, timeout: float | None = None) -> tuple[int, str]:
        """Exit code and output of a run of these tests; 124 if it took longer than `timeout` seconds."""
        # addopts may hold options for many workers; a fixed seed makes property-based tests repeat themselves
        arguments = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=no", "-r", "fE", "--hypothesis-seed=0"]
        notebooks = any(test.endswith(".ipynb") for test in tests)
        arguments += ["--nbval-lax", "--nbval-current-env"] if notebooks else ["-p", "no:nbval"]
        log = self.folder.with_name(f"{self.folder.name}.log")
        given = (str(self.folder), self.variables, [*arguments, *options, *tests], str(log))
        process = FORKS.Process(target=run_pytest, args=given)
        process.start()
        process.join(timeout)
        code = 124 if process.exitcode is None else process.exitcode
        process.kill()  # does nothing where it has ended
        process.join()
        return code, log.read_text(encoding="utf-8", errors="replace")

    def plant(self, bug: Bug) -> str:
        """Tries one bug, takes it out again, prints and returns what became of it, in one of the words above."""
        path, began = self.folder / bug.file, time.monotonic()
        try:
            sound = path.read_text(encoding="utf-8")
            path.write_text(bug.patched(sound), encoding="utf-8")
            code, output = self.pytest(bug.tests, "-x", timeout=SECONDS)
            path.write_text(sound, encoding="utf-8")
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            detail = failed[1] if failed else f"pytest ended with code {code}: {last_line(output)}"
            result = {0: NOT_CAUGHT, 1: CAUGHT, 124: NOT_CAUGHT}.get(code, ERROR)
        except (OSError, ValueError) as error:
            result, detail = DOES_NOT_APPLY, str(error)
        print(f"{result:<14}  {time.monotonic() - began:5.1f} s  {bug.name}  {detail}", flush=True)
        return result


def last_line(output: str) -> str:
    """The last line that holds anything."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def plant_all(copies: Sequence[Copy], bugs: Sequence[Bug]) -> int:
    """Tries all bugs, as many at a time as there are copies; returns how many were caught."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def plant(bug: Bug) -> str:
        copy = free.get()
        try:
            return copy.plant(bug)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        return [*pool.map(plant, bugs)].count(CAUGHT)


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
    parser.add_argument("--skip-check", action="store_true", help="do not run the tests unpatched first")
    parser.add_argument("--nbval", action="store_true", help="bugs with a notebook, to be caught there")
    options = parser.parse_args(arguments)
    bugs = choose(read_bugs(bugs_file), options.wanted)
    if options.nbval:
        bugs = [replace(bug, tests=(bug.notebook,)) for bug in bugs if bug.notebook]
    os.environ["OMP_NUM_THREADS"] = "1"  # before the processes that are forked from import PyTorch, and Triton with it
    if not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py, which here would come too late
    FORKS.set_forkserver_preload(list(preloaded))
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        copies = [Copy(root, Path(folder) / f"copy{i}") for i in range(max(1, min(options.jobs, len(bugs))))]
        tests = list(dict.fromkeys(test for bug in bugs for test in bug.tests))
        if not options.skip_check:
            print(f"{len(tests)} named tests or files without any bug.", flush=True)
            code, output = copies[0].pytest(tests)
            if code:
                print(f"These fail unpatched, so nothing can be caught by them:\n{output}")
                return 1
        caught = plant_all(copies, bugs)
    print(f"{caught} of {len(bugs)} planted bugs were caught.")
    return 0 if caught == len(bugs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
