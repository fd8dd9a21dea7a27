"""Coverage: the problems of the courses' handouts (problems.csv), and which of them the notebooks' answers solve."""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

DONE, PARTLY, OPEN = "done", "partly", "not yet"
COURSES = ("CS336", "CSE599-O", "A1", "A2", "2025", "2026")
"""What a part may name of a handout: its course, the assignment, or the year."""


@dataclass
class Answered:
    """An answer to a problem or a part of one, and what its notebook shows before it."""

    problem: str
    part: str
    notebook: str = ""
    missing: str = ""
    """What the handout asks for and the answer lacks."""
    text: str = ""
    """In Markdown, as are these: the last table and figure of its section, and the samples of text."""
    table: str = ""
    figure: str = ""
    samples: str = ""


@dataclass(frozen=True)
class Problem:
    """A problem of one handout, and what of it is answered."""

    handout: str
    place: str
    """Page, or section where the handout has no pages."""
    name: str
    points: str
    """The marks that the handout gives; empty where it gives none."""
    tests: str
    """Files of tests, of a problem that asks for code."""
    answers: list[Answered]
    """In the order of the parts."""
    missing: str
    """What is asked for and not there, of a problem with an answer: parts, and what the answers say they lack."""

    @property
    def state(self) -> str:
        """done, partly or not yet."""
        return OPEN if not self.answers else PARTLY if self.missing else DONE


def plain_name(problem: str) -> str:
    """A problem's name without case and marks, in which handouts and notebooks differ."""
    return re.sub(r"[^a-z0-9]", "", problem.lower())


def coverage(answers: Iterable[Answered]) -> list[Problem]:
    """All problems of the handouts (problems.csv), given every answer that there is.

    An answer to a part such as "c, CS336" or "A1" counts for the handouts that are named so, any other for all that
    have the problem and no answer of their own.
    """
    of_problem: dict[str, list[tuple[str, str, Answered]]] = {}
    for answer in answers:
        of_problem.setdefault(plain_name(answer.problem), []).append((*letter_and_course(answer.part), answer))
    text = resources.files("workbook.report").joinpath("problems.csv").read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        named = [each for each in of_problem.get(plain_name(row["problem"]), []) if each[1] in row["handout"]]
        closest: dict[str, str] = {}
        for letter, course, _ in named:
            closest[letter] = max(closest.get(letter, ""), course, key=("", *COURSES).index)
        named = [each for each in named if each[1] == closest[each[0]]]
        named.sort(key=lambda each: each[0] if row["parts"] else "")
        letters = {letter for letter, *_ in named}
        # an answer without a part is one to all parts
        absent = [f"({part})" for part in row["parts"] if part not in letters and "" not in letters]
        answered = len(absent) < len(row["parts"]) if row["parts"] else bool(named)
        here = row["parts"] or letters  # one that has no parts takes every answer
        given = [each for letter, _, each in named if letter in ("", *here)] if answered else []
        told = [(letter, each.missing) for letter, _, each in named if each.missing and letter in ("", *here)]
        lacking = [f"({letter}) {words}" if letter in row["parts"] and letter else words for letter, words in told]
        missing = "; ".join([*([" ".join(absent)] if absent else []), *dict.fromkeys(lacking)]) if answered else ""
        fields = (row[key] for key in ("handout", "place", "problem", "points", "tests"))
        found.append(Problem(*fields, given, missing))
    return found


def letter_and_course(part: str) -> tuple[str, str]:
    """Of a part such as "c, CS336", "A1" or "b": its letter, and the handouts that it is for ("": for all)."""
    letter, _, course = ("", "", part) if part in COURSES else part.partition(", ")
    return letter[:1], course if course in COURSES else ""
