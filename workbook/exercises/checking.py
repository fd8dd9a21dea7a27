"""`check`: a reader's solution beside the library's; what was solved is kept in the output folder."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lmcore.errors import require
from lmcore.files import read_json, write_json
from workbook.exercises import chapters as chapters  # fills EXERCISES
from workbook.exercises.exercise import EXERCISES, Exercise, difference, largest_error
from workbook.exercises.guard import Refused, run

progress_file = Path("exercises.json")
"""Where what was solved is kept; `begin` sets it."""


@dataclass(frozen=True)
class Verdict:
    """Whether a solution is right, and a sentence."""

    passed: bool
    words: str


def begin(out: str | Path) -> None:
    """Keeps what is solved from now on in the output folder of a notebook."""
    global progress_file
    progress_file = Path(out) / "exercises.json"


def check(name: str, solution: Any) -> Any:
    """Says whether a solution of the exercise `name` is right, else what its mistake may be.

    `solution` is a function, a class, or the number that is asked for. Returns it if it is right, else the library's
    own, with which the notebook goes on. Raises `UserError` where there is no such exercise.
    """
    exercise = of_name(name)
    verdict = judge(exercise, solution)
    keep(name, solved=verdict.passed)
    mark = "✓" if verdict.passed else "✗"
    goes_on = "" if verdict.passed else " What follows uses the library's."
    print(f"{mark} {name}: {verdict.words}{goes_on}")
    return solution if verdict.passed else exercise.answer


def of_name(name: str) -> Exercise:
    """The exercise of that name. Raises `UserError` where there is none."""
    require(name in EXERCISES, f"There is no exercise {name!r}; there are {', '.join(EXERCISES)}.")
    return EXERCISES[name]


def judge(exercise: Exercise, solution: Any, guarded: bool = True) -> Verdict:
    """Compares a solution with the library's, case by case, and looks for a usual mistake where they differ.

    `guarded`: what the exercise is about may not be called, nor take for ever (`workbook.exercises.guard`).
    """
    found = attempt(exercise, solution, guarded)
    return Verdict(False, found) if isinstance(found, str) else judge_outcomes(exercise, found)


def attempt(exercise: Exercise, solution: Any, guarded: bool = True) -> list[Any] | str:
    """What a solution makes of each case (of a question: the number alone), or a sentence why there is nothing."""
    if exercise.is_question:
        return "not answered yet." if solution is None or solution is ... else [solution]
    if not callable(solution) and not isinstance(solution, tuple):  # a tuple of functions that belong together
        return f"A function or a class is asked for, not a {type(solution).__name__}."
    inputs = exercise.inputs()
    try:
        if not guarded:
            return exercise.of_inputs(solution, inputs)
        return run(lambda: exercise.of_inputs(solution, inputs), exercise.avoid, exercise.seconds)
    except NotImplementedError:
        return "not written yet."
    except Refused as refused:
        return str(refused)
    except Exception as error:
        return f"Your code raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def judge_outcomes(exercise: Exercise, found: list[Any]) -> Verdict:
    """Compares what a solution made of the cases with the library's; names a usual mistake where that differs."""
    if exercise.is_question:
        return _judge_number(exercise, found[0])
    expected = exercise.outcomes(exercise.answer)
    words = difference(found, expected, exercise.tolerance)
    if words is None:
        return Verdict(True, f"right in {len(expected)} cases.")
    if len(found) == len(expected):
        for sentence, wrong in exercise.mistakes.items():
            if _alike(found, exercise.outcomes(wrong), expected, exercise.tolerance):
                return Verdict(False, sentence)
    return Verdict(False, f"Case {words.removeprefix('Item ')}" if words.startswith("Item") else words)


def _judge_number(exercise: Exercise, found: Any) -> Verdict:
    if not (words := difference(found, exercise.answer, exercise.tolerance)):
        return Verdict(True, "right.")
    for sentence, wrong in exercise.mistakes.items():
        if not difference(found, wrong, exercise.tolerance):
            return Verdict(False, sentence)
    number = isinstance(found, int | float) and exercise.answer
    return Verdict(False, f"It is {found / exercise.answer:.3g} times what it should be." if number else words)


def _alike(found: list, wrong: list, expected: list, tolerance: float) -> bool:
    """Whether a solution gives what a usual mistake gives, wherever that is not right."""
    told = [case for case in range(len(wrong)) if difference(wrong[case], expected[case], tolerance)]
    return bool(told) and all(difference(found[case], wrong[case], tolerance) is None for case in told)


def keep(name: str, **values: Any) -> None:
    """Notes something of an exercise in `progress_file`."""
    kept = read_json(progress_file) if progress_file.exists() else {}
    kept[name] = kept.get(name, {}) | values
    write_json(progress_file, kept)


def predict(name: str, guess: float) -> None:
    """Keeps a guess at what is measured next; `reveal` shows it beside the measurement."""
    keep(name, guess=guess)
    print(f"{name}: you expect {guess:g}.")


def reveal(name: str, measured: float) -> None:
    """Shows what was measured beside the guess, and how far they are apart."""
    kept = read_json(progress_file) if progress_file.exists() else {}
    guess = kept.get(name, {}).get("guess")
    keep(name, measured=float(measured))
    beside = "" if guess is None else f"; you expected {guess:g}, {_apart(guess, measured)}"
    print(f"{name}: {measured:.3g}{beside}.")


def _apart(guess: float, measured: float) -> str:
    if guess * measured <= 0:
        return f"{abs(guess - measured):.3g} away"
    ratio = max(guess / measured, measured / guess)
    return "as it is" if ratio < 1.05 else f"{ratio:.2g} times too {'much' if abs(guess) > abs(measured) else 'little'}"


def status() -> pd.DataFrame:
    """A table of the notebooks: how many exercises are solved, and which are next."""
    kept = read_json(progress_file) if progress_file.exists() else {}
    rows = []
    for notebook in dict.fromkeys(exercise.notebook for exercise in EXERCISES.values()):
        names = [name for name, exercise in EXERCISES.items() if exercise.notebook == notebook]
        left = [name for name in names if not kept.get(name, {}).get("solved")]
        solved = f"{len(names) - len(left)} of {len(names)}"
        rows.append({"notebook": notebook, "solved": solved, "next": ", ".join(left[:3]) or "–"})
    return pd.DataFrame(rows).set_index("notebook")


def compare(name: str, own: Callable, theirs: Callable | None = None) -> pd.DataFrame:
    """Error and time of one's own solution beside the library's, and beside `theirs`, PyTorch's, where there is one."""
    exercise, rows = of_name(name), []
    expected = exercise.outcomes(exercise.answer)
    for whose, solution in (("yours", own), ("lmcore", exercise.answer), ("PyTorch", theirs)):
        if solution is None:
            continue
        found, seconds = exercise.outcomes(solution), []
        for _ in range(5):
            start = time.perf_counter()
            exercise.outcomes(solution)
            seconds.append(time.perf_counter() - start)
        rows.append({"solution": whose, "largest error": largest_error(found, expected), "time": min(seconds)})
    return pd.DataFrame(rows).set_index("solution")
