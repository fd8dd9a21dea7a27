"""The exercises of a hand-in, run again in a process with limits and judged here, by our own notebooks' checks."""

import ast
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lmcore.files import temporary_folder
from workbook.exercises.checking import Verdict, judge_outcomes
from workbook.exercises.exercise import EXERCISES
from workbook.grading.attempt import unpack
from workbook.notebook import code_cells, read_notebook, tags

EXERCISE, CHECK = "exercise", "check"
"""Tags of a cell that a reader writes, and of the cell after it that checks it."""

CHECK_CALL = re.compile(r'(?:(.+?) = )?check\("(\w+)", (.+)\)')

REFUSED = {"lmcore", "workbook", "importlib", "__import__", "eval", "exec", "setprofile", "settrace", "inspect", "gc"}
"""Names that the cell of an exercise may not have: by them, the answer could be had without writing it."""


@dataclass(frozen=True)
class Limits:
    """What the code of a hand-in may take."""

    memory: int = 6_000_000_000
    """Bytes of address space, of which PyTorch takes some two thousand million for itself."""
    seconds: float = 120.0
    """For one exercise, or for the first with the imports before it; a notebook has five times as many."""

    def hold(self, process: subprocess.Popen) -> None:
        """Limits the memory of a process and of all that it starts, and its processor time, where Linux does it."""
        if hasattr(resource, "prlimit"):
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_AS, (self.memory, self.memory))
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds := int(self.seconds * 20), seconds + 5))


@dataclass
class Checks:
    """The exercises of one of our own notebooks."""

    cells: list[str] = field(default_factory=list)
    """Ids of the cells that a reader writes."""
    checks: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the id of the cell that checks: the exercise, what is checked, and the name that is bound to the verdict."""


def checks_of(notebook: Path) -> Checks:
    """What our notebook checks; a hand-in's own check cells are never looked at."""
    found = Checks()
    for _, cell in code_cells(read_notebook(notebook)):
        if EXERCISE in tags(cell):
            found.cells.append(cell.id)
        if CHECK in tags(cell) and (call := CHECK_CALL.search(cell.source)):
            found.checks[cell.id] = {"target": call[1] or "", "name": call[2], "solution": call[3]}
    return found


def grade_exercises(notebook: Path, checks: Checks, limits: Limits) -> dict[str, Verdict]:
    """A verdict for each exercise in a notebook of a hand-in.

    A process that dies or takes too long costs the exercise that it was at; the others go on in a new one.
    """
    names = [check["name"] for check in checks.checks.values()]
    verdicts = _refused(notebook, checks)
    while left := [name for name in names if name not in verdicts]:
        found, at, how = _attempts(notebook, checks, {name: of.passed for name, of in verdicts.items()}, limits)
        verdicts |= {name: _verdict(name, outcome) for name, outcome in found.items()}
        if how:
            verdicts[at or left[0]] = Verdict(False, how)
    return {name: verdicts[name] for name in names}


def _refused(notebook: Path, checks: Checks) -> dict[str, Verdict]:
    """Exercises whose cell names what would be the answer itself."""
    refused = {}
    for _, cell in code_cells(read_notebook(notebook)):
        if cell.get("id") not in checks.cells:
            continue
        used = set(re.findall(r"\w+", cell.source)) & REFUSED
        try:
            defined = {getattr(node, "name", getattr(node, "id", None)) for node in ast.walk(ast.parse(cell.source))}
        except SyntaxError:
            continue
        for check in checks.checks.values():
            if used and set(re.findall(r"\w+", check["solution"])) & defined:
                words = f"The cell has {', '.join(sorted(used))}: write it without."
                refused[check["name"]] = Verdict(False, words)
    return refused


def _attempts(notebook: Path, checks: Checks, done: dict[str, bool], limits: Limits) -> tuple[dict[str, Any], str, str]:
    """Outcomes by exercise; where the process ended early, the exercise that it was at, and how it ended."""
    with temporary_folder("lmcore-grade-") as folder:
        (lines := folder / "outcomes.jsonl").touch()
        given = [notebook.resolve(), json.dumps(asdict(checks)), json.dumps(done), lines]
        process = subprocess.Popen(
            [*map(str, [sys.executable, "-m", "workbook.grading.attempt", *given])],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        limits.hold(process)
        size, since, how = 0, time.monotonic(), ""
        while process.poll() is None and not how:
            time.sleep(0.05)
            if (grown := lines.stat().st_size) != size:
                size, since = grown, time.monotonic()
            elif time.monotonic() - since > limits.seconds:
                how = f"It took longer than {limits.seconds:g} s."
        end_group(process)
        written = [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}")]
    asked = {check["name"] for check in checks.checks.values()} - done.keys()
    found = {line["name"]: unpack(line["found"]) for line in written if line.get("name") in asked}
    begun = [line["begin"] for line in written if line.get("begin") in asked - found.keys()]
    if not how and len(found) < len(asked):
        how = f"Its process ended with {process.returncode} before the exercise was done."
    return found, begun[-1] if begun else "", how


def end_group(process: subprocess.Popen) -> None:
    """Kills what is left of a process and of those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@cache
def _expected(name: str) -> list[Any]:
    return EXERCISES[name].outcomes(EXERCISES[name].answer)


def _verdict(name: str, found: Any) -> Verdict:
    """Judges outcomes; text instead of them is why there are none."""
    if isinstance(found, str):
        return Verdict(False, found)
    return judge_outcomes(EXERCISES[name], found)
