"""`check`: a reader's solution beside the library's; what was solved is kept in the output folder."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lmcore.errors import require
from lmcore.files import locked, read_json, write_json
from workbook.exercises import cases as cases  # fills EXERCISES
from workbook.exercises import guard
from workbook.exercises.exercise import EXERCISES, Exercise, places

progress_file = Path("exercises.json")
"""Where what was solved is kept; `begin` sets it."""


class Verdict(NamedTuple):
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
    own, which later cells use. Raises `UserError` where there is no such exercise.
    """
    require(name in EXERCISES, f"There is no exercise {name!r}; there are {', '.join(EXERCISES)}.")
    exercise = EXERCISES[name]
    verdict = judge(exercise, solution)
    keep(name, solved=verdict.passed)
    mark = "✓" if verdict.passed else "✗"
    goes_on = "" if verdict.passed else " What follows uses the library's."
    print(f"{mark} {name}: {verdict.words}{goes_on}")
    return solution if verdict.passed else exercise.answer


def judge(exercise: Exercise, solution: Any, guarded: bool = True) -> Verdict:
    """Compares a solution with the library's, case by case, and looks for a usual mistake where they differ.

    `guarded`: what the exercise is about may not be called, nor take for ever (`workbook.exercises.guard`).
    """
    found = attempt(exercise, solution, guarded)
    return Verdict(False, found) if isinstance(found, str) else judge_outcomes(exercise, found)


def attempt(exercise: Exercise, solution: Any, guarded: bool = True) -> list[Any] | str:
    """What a solution makes of each case (of a question: the number alone), or a sentence why there is nothing."""
    if solution is None or solution is ...:
        return "not answered yet."
    if not exercise.is_question and not callable(solution) and not isinstance(solution, type(exercise.answer)):
        return f"A function or a class is asked for, not a {type(solution).__name__}."
    inputs, given = exercise.inputs(), answers_before(exercise)
    own = answers_before(None) - given
    if guarded and any(place in own | given or place[0].startswith(guard.LIBRARY) for place in places(solution)):
        return "This is the library's; write your own."
    try:
        exercise.expected  # noqa: B018 (first: what PyTorch imports on the way takes none of the reader's time)
        if not guarded:
            return exercise.of_inputs(solution, inputs)
        with guard.guarded(exercise.avoid, exercise.seconds, own, given):
            return exercise.of_inputs(solution, inputs)
    except NotImplementedError:
        return "not written yet."
    except guard.Refused as refused:
        return str(refused)
    except Exception as error:
        return f"Your code raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def judge_outcomes(exercise: Exercise, found: list[Any]) -> Verdict:
    """Compares what a solution made of the cases with the library's; names a usual mistake where that differs."""
    expected = exercise.expected
    if len(found) != len(expected):
        return Verdict(False, f"There are {len(found)} results, not {len(expected)}.")
    differences = exercise.differences(found, expected)
    if not any(differences):
        cases = len(expected) - len(exercise.dtypes)
        return Verdict(True, "right." if exercise.is_question else f"right in {cases} case{'s' * (cases > 1)}.")
    for sentence, wrong in exercise.mistakes.items():
        if _alike(exercise, found, exercise.of_inputs(wrong, exercise.inputs())):
            return Verdict(False, sentence)
    case, words = next((case, words) for case, words in enumerate(differences) if words)
    words = "Your function returns None: is a `return` missing?" if found[case] is None else words
    if not exercise.is_question:
        return Verdict(False, f"Case {case}: {words}")
    ratio = found[0] / expected[0] if isinstance(found[0], int | float) and expected[0] else None
    return Verdict(False, words if ratio is None else f"It is {ratio:.3g} times what it should be.")


def answers_before(exercise: Exercise | None) -> set[guard.Place]:
    """Where the answers are to all exercises before this one, which the reader may have been given back."""
    before = itertools.takewhile(lambda name: exercise is None or name != exercise.name, EXERCISES)
    return set().union(*(places(EXERCISES[name].answer) for name in before))


def _alike(exercise: Exercise, found: list, wrong: list) -> bool:
    """Whether a solution gives what a usual mistake gives, wherever that is not right."""
    told = [case for case, words in enumerate(exercise.differences(wrong, exercise.expected)) if words]
    apart = exercise.differences(found, wrong)
    return bool(told) and all(apart[case] is None for case in told)


def kept() -> dict[str, dict[str, Any]]:
    """What is noted in `progress_file`, by name."""
    return read_json(progress_file) if progress_file.exists() else {}


def keep(name: str, **values: Any) -> None:
    """Notes something of an exercise in `progress_file`; notebooks that run at once wait for each other."""
    with locked(progress_file.with_suffix(".lock"), "", seconds=-1):
        everything = kept()
        everything[name] = everything.get(name, {}) | values
        write_json(progress_file, everything)


def predict(name: str, guess: float) -> None:
    """Keeps a guess at what is measured next; `reveal` shows it beside the measurement."""
    keep(name, guess=guess)
    print(f"{name}: you expect {guess:g}.")


def reveal(name: str, measured: float) -> None:
    """Shows what was measured beside the guess, and how far they are apart."""
    guess = kept().get(name, {}).get("guess")
    keep(name, measured=float(measured))
    beside = "" if guess is None or measured != measured else f"; you expected {guess:g}, {_apart(guess, measured)}"
    shown = f"{float(f'{measured:.4g}'):,g}" if measured == measured else "not measured"
    print(f"{name}: {shown}{beside}.")


def _apart(guess: float, measured: float) -> str:
    if guess * measured <= 0 or max(guess, measured) <= 1:  # shares: 13 times too little says nothing of 7% and 90%
        return f"{abs(guess - measured):.2g} away"
    ratio = max(guess / measured, measured / guess)
    return "as it is" if ratio < 1.05 else f"{ratio:.2g} times too {'much' if abs(guess) > abs(measured) else 'little'}"


def status() -> pd.DataFrame:
    """A table of all notebooks: how many exercises are solved, and which are next."""
    noted, rows = kept(), []
    for notebook in dict.fromkeys(exercise.notebook for exercise in EXERCISES.values()):
        names = [name for name, exercise in EXERCISES.items() if exercise.notebook == notebook]
        left = [name for name in names if not noted.get(name, {}).get("solved")]
        solved = f"{len(names) - len(left)} of {len(names)}"
        rows.append({"notebook": notebook, "solved": solved, "next": ", ".join(left[:3]) or "–"})
    return pd.DataFrame(rows).set_index("notebook")
