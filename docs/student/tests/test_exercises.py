"""One test for each exercise: what fails is not written yet, or not right."""

from functools import cache
from pathlib import Path

import pytest

from workbook.grading.exercises import checks_of, grade_exercises
from workbook.grading.limits import Limits

NOTEBOOKS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9]*.ipynb"))}
CHECKS = {name: checks_of(path) for name, path in NOTEBOOKS.items()}


@cache
def verdicts(notebook):
    return grade_exercises(NOTEBOOKS[notebook], CHECKS[notebook], Limits())


@pytest.mark.parametrize(
    ("notebook", "exercise"),
    [(notebook, check["name"]) for notebook, checks in CHECKS.items() for check in checks["checks"].values()],
)
def test_exercise(notebook, exercise):
    verdict = verdicts(notebook)[exercise]
    assert verdict.passed, verdict.words
