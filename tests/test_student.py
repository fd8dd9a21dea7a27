"""The edition for students: no solutions, outputs, answers or results; its tests fail on exactly the exercises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.errors import UserError
from workbook.grading.exercises import checks_of, grade_exercises
from workbook.grading.limits import Limits
from workbook.notebook import EXERCISE, read_notebook, tags
from workbook.student import SOLUTION, student, without_answers

ROOT = Path(__file__).parents[1]


ANSWER = re.compile(r"(?<!\w)answer\(.*")


def code_of(path):
    return "\n".join(cell.source for cell in read_notebook(path).cells if cell.cell_type == "code")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edition") / "student"
    assert student(folder) == 0
    return folder


def test_no_solution_output_answer_or_result_is_left(edition):
    ours = {path.name: code_of(path) for path in ROOT.glob("notebooks/[0-9]*.ipynb")}
    solutions = [found[0] for text in ours.values() for found in SOLUTION.finditer(text)]
    assert len(solutions) >= 60
    lines = {line.strip() for text in solutions for line in text.splitlines()}
    long = {line for line in lines if len(line) > 40 and not line.startswith("#")}
    for path in edition.glob("notebooks/*.ipynb"):
        text, notebook = path.read_text(), read_notebook(path)
        assert "BEGIN SOLUTION" not in text
        assert not [line for line in long if json.dumps(line)[1:-1] in text]
        assert not any(cell.get("outputs") for cell in notebook.cells)
        assert "find_project" not in code_of(path)  # what it would read there, results of ours, is left out
        assert not re.findall(r"texts\[course\] = (?!\.\.\.$|answer)", code_of(path), re.MULTILINE)
        calls = ANSWER.findall(code_of(path))
        assert len(calls) == len(ANSWER.findall(ours[path.name])) > 0
        assert all(re.fullmatch(r'answer\((f?"[^"]+"|problem), \.\.\.\)(  # fmt: skip)?', call) for call in calls), (
            calls
        )
    assert not [*edition.glob("results"), *edition.glob("writeup"), *edition.glob("**/answers.json")]


def test_its_notebooks_have_stubs_and_every_check(edition):
    for path in ROOT.glob("notebooks/[0-9]*.ipynb"):
        checks, stubs = checks_of(path), checks_of(edition / "notebooks" / path.name)
        assert checks == stubs
        for cell in read_notebook(edition / "notebooks" / path.name).cells:
            if EXERCISE in tags(cell):
                assert "NotImplementedError" in cell.source or " = ..." in cell.source, cell.id


@pytest.mark.parametrize("name", [path.stem for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))])
def test_exactly_the_exercises_fail_and_our_solutions_pass(edition, name):
    ours = ROOT / "notebooks" / f"{name}.ipynb"
    checks = checks_of(ours)
    solved = grade_exercises(ours, checks, Limits())
    assert [(exercise, verdict.words) for exercise, verdict in solved.items() if not verdict.passed] == []
    stubs = grade_exercises(edition / "notebooks" / ours.name, checks, Limits())
    assert {verdict.words for verdict in stubs.values()} <= {"not written yet.", "not answered yet."}


def test_a_folder_that_is_there_is_kept(edition):
    with pytest.raises(UserError, match="is there already"):
        student(edition)


def test_the_text_of_an_answer_goes_with_what_it_holds():
    source = 'share = 1\nanswer(\n    "a (b)",\n    f"{share} of all",\n    holds={"more": share > 0},\n)'
    assert without_answers(source) == 'share = 1\nanswer("a (b)", ...)'


def test_its_own_files_run(edition):
    listed = subprocess.run(["make", "help"], cwd=edition, capture_output=True, text=True, check=True).stdout
    assert "make" in listed or "test" in listed
    collected = [sys.executable, "-m", "pytest", "-q", "-p", "no:nbval", "--collect-only", "tests"]
    found = subprocess.run(collected, cwd=edition, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert "AGENTS.md" in {path.name for path in edition.iterdir()}
