"""Exercises: solutions pass, usual mistakes are named, and what would be the answer itself gets no credit."""

import math
import re
import time

import pytest
import torch

import lmcore.functional
from lmcore.errors import UserError
from workbook.exercises import checking as checks
from workbook.exercises.checking import judge
from workbook.exercises.exercise import EXERCISES, difference

MISTAKES = [(name, words) for name, exercise in EXERCISES.items() for words in exercise.mistakes]


@pytest.fixture(autouse=True)
def progress(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "progress_file", tmp_path / "exercises.json")


def stub(*_):
    raise NotImplementedError


@pytest.mark.parametrize("name", EXERCISES)
def test_the_answer_is_right_and_a_stub_is_not(name):
    exercise = EXERCISES[name]
    assert judge(exercise, exercise.answer, guarded=False).passed
    empty = (stub, stub) if isinstance(exercise.answer, tuple) else ... if exercise.is_question else stub
    verdict = judge(exercise, empty)
    assert (verdict.passed, "yet" in verdict.words) == (False, True)
    assert len(exercise.mistakes) >= 2


@pytest.mark.parametrize(("name", "words"), MISTAKES)
def test_a_usual_mistake_is_named(name, words):
    verdict = judge(EXERCISES[name], EXERCISES[name].mistakes[words], guarded=False)
    assert (verdict.passed, verdict.words) == (False, words)


def slow_softmax(x, dim):
    time.sleep(0.01)
    x = x - x.max(dim, keepdim=True).values
    return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)


def renamed_softmax(x, dim, borrowed=torch.softmax):
    return borrowed(x, dim)


def endless(x, dim):
    while True:
        x = x + 0


REFUSED = {
    "calls lmcore": lambda x, dim: lmcore.functional.softmax(x, dim),
    "calls softmax of a library": renamed_softmax,
    "took longer than 1 s": endless,
    "raises KeyError": lambda x, dim: {}[dim],
    r"has the shape \(\), not \(2, 3\)": lambda x, dim: x.sum(),
    "is float64, not float32": lambda x, dim: slow_softmax(x.double(), dim),
    "is a list, not a tensor": lambda x, dim: x.tolist(),
}


@pytest.mark.parametrize(("words", "solution"), [*REFUSED.items()], ids=[*REFUSED])
def test_other_solutions_get_a_sentence(words, solution):
    exercise = EXERCISES["softmax"]
    limited = type(exercise)(**vars(exercise) | {"seconds": 1.0})
    verdict = judge(limited, solution)
    assert not verdict.passed
    assert re.search(words, verdict.words)


def test_a_check_gives_back_what_the_notebook_goes_on_with(capsys):
    assert checks.check("softmax", slow_softmax) is slow_softmax
    assert checks.check("softmax", torch.exp) is EXERCISES["softmax"].answer
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("✓ softmax: right in 3 cases")
    assert said[1].startswith("✗ softmax: ")
    assert said[1].endswith("What follows uses the library's.")
    assert checks.status().loc["01_build", "solved"].startswith("0 of ")  # the last word counts
    checks.check("softmax", slow_softmax)
    assert checks.status().loc["01_build", "solved"].startswith("1 of ")
    with pytest.raises(UserError, match="There is no exercise 'sofmax'"):
        checks.check("sofmax", slow_softmax)


def test_a_guess_is_shown_beside_what_was_measured(capsys):
    checks.predict("share", 0.5)
    checks.reveal("share", 0.2)
    checks.reveal("unasked", 3.0)
    said = ["share: you expect 0.5.", "share: 0.2; you expected 0.5, 2.5 times too much.", "unasked: 3."]
    assert capsys.readouterr().out.splitlines() == said


def test_numbers_compare_within_the_tolerance():
    assert difference({"a": [1.0, math.nan]}, {"a": [1.0 + 1e-7, math.nan]}, 1e-5) is None
    assert difference({"a": [1.0, 2.0]}, {"a": [1.0, 3.0]}, 1e-5) == "a: Item 1: The result is 2, not 3."
    assert difference([1], [1, 2], 1e-5) == "The result has 1 items, not 2."
