"""`workbook grade`: one table for the course, a rubric for each student, and Gradescope's results.json."""

import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, read_json, temporary_folder, write_json
from workbook.grading.archives import unpack
from workbook.grading.exercises import Checks, Limits, checks_of, grade_exercises
from workbook.grading.recompute import recomputed_answers, replayed
from workbook.handin import MANIFEST
from workbook.record import read_records
from workbook.report.contents import read_contents
from workbook.report.coverage import DONE, OPEN, coverage
from workbook.report.verify import pages_and_keywords
from workbook.report.writeup import HANDOUTS, executed_notebooks, in_a_cell
from workbook.seal import changed_by_hand, file_hashes, notebooks_digest


@dataclass
class Row:
    """One line of a rubric: an exercise or a problem, its marks, and why."""

    name: str
    score: float
    most: float
    words: str


@dataclass
class Grade:
    """What a hand-in is worth, and what of it does not fit together."""

    student: str
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    replay: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """Path of each record in the hand-in, by its hash."""

    @property
    def score(self) -> float:
        """Marks of all rows."""
        return sum(row.score for row in self.rows)

    @property
    def most(self) -> float:
        """Marks that can be had."""
        return sum(row.most for row in self.rows)


def grade_course(handins: Path, to: Path, project: Path, handout: str, limits: Limits, at_once: int = 2) -> list[Grade]:
    """Grades each hand-in in the folder `handins` (a folder or an archive each) for a handout, by its PDF's name.

    Writes grades.csv, and NAME.md and NAME.json for each, into `to`. A hand-in that cannot be read has no marks and a
    sentence; the others are graded all the same.
    """
    found = sorted(path for path in handins.iterdir() if path.is_dir() or path.suffix == ".zip")
    require(bool(found), f"There is no hand-in in {handins}: a folder or an archive for each student.")
    checks = {path.stem: checks_of(path) for path in sorted((project / "notebooks").glob("*.ipynb"))}
    ours = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (project / "results").glob("*/*.json")}
    with ThreadPoolExecutor(at_once) as pool:
        grades = [*pool.map(lambda path: _graded(path, project, handout, checks, limits), found)]
    of = defaultdict(list)
    for grade in grades:
        for digest in grade.files:
            of[digest].append(grade)
    for grade in grades:
        for digest, path in grade.files.items():
            others = [other.student for other in of[digest] if other is not grade]
            others += ["the workbook itself"] * (digest in ours)
            if others:
                grade.faults.append(f"{path} is the very file of {', '.join(others[:3])}.")
                break
    write_grades(grades, to)
    return grades


def _graded(handin: Path, project: Path, handout: str, checks: dict[str, Checks], limits: Limits) -> Grade:
    grade = Grade(handin.stem)
    with temporary_folder("lmcore-handin-") as folder:
        try:
            unpack(handin, folder)
            out = folder / "results"
            records = read_records(out)
            notebooks = executed_notebooks(out, records)
            contents = [read_contents(name, notebook, folder) for name, notebook in notebooks.items()]
            grade.faults += _manifest_faults(folder)
            grade.faults += [record.unfinished for record in records if record.unfinished]
            grade.faults += changed_by_hand(out, [record.name for record in records if record.state == "done"])
            grade.faults += _pdf_faults(folder, notebooks_digest([*notebooks.values()]))
            grade.files = {
                digest: path for path, digest in file_hashes(out) if path.endswith(("metrics.jsonl", ".json"))
            }
            wrong: dict[str, str] = {}
            for name in notebooks:
                if checks.get(name) and checks[name].checks:
                    verdicts = grade_exercises(out / "notebooks" / f"{name}.ipynb", checks[name], limits)
                    grade.rows += [Row(each, float(of.passed), 1.0, of.words) for each, of in verdicts.items()]
                for problem, sentence in recomputed_answers(out, name, project, limits):
                    wrong[problem or name] = sentence
                    grade.faults.append(sentence)
            grade.rows += _problem_rows(handout, [a for each in contents for a in each.answers], wrong)
            right, grade.replay = replayed(out, limits)
            grade.faults += [grade.replay] if right is False else []
        except UserError as error:
            grade.faults.append(str(error))
        except Exception as error:  # a hand-in that breaks the grader costs its own row
            grade.faults.append(f"It cannot be graded: {type(error).__name__}: {error}")
    return grade


def _manifest_faults(folder: Path) -> Iterator[str]:
    """A sentence for each file that is not as the hand-in was made."""
    require((folder / MANIFEST).is_file(), f"There is no {MANIFEST}: make the hand-in with `make handin`.")
    for name, digest in read_json(folder / MANIFEST).items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is gone from the hand-in."
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            yield f"{name} was changed after the hand-in was made."


def _pdf_faults(folder: Path, made_from: str) -> Iterator[str]:
    pdfs = [*folder.glob("*.pdf")]
    if not pdfs:
        yield "There is no PDF."
    for pdf in pdfs:
        try:
            if made_from not in pages_and_keywords(pdf)[1]:
                yield f"{pdf.name} was made from other notebooks than these."
        except UserError as error:
            yield str(error)


def _problem_rows(handout: str, answers: list, wrong: dict[str, str]) -> Iterator[Row]:
    """The handout's problems: half the marks where a part is missing, none where its answer is not what tables give."""
    for problem in coverage(answers):
        if HANDOUTS[problem.handout].name == handout:
            most = float(problem.points or 1)
            faults = [of for name, of in wrong.items() if name.partition(" ")[0] == problem.name]
            share = {DONE: 1.0, OPEN: 0.0}.get(problem.state, 0.5)
            words = faults[0] if faults else problem.missing or problem.state
            yield Row(problem.name, 0.0 if faults else share * most, most, words)


def write_grades(grades: list[Grade], to: Path) -> None:
    """Writes the table of the course, and for each student a rubric and what Gradescope reads."""
    with atomic_write(to / "grades.csv", "w") as file:
        table = csv.writer(file)
        table.writerow(["student", "score", "of", "rows with full marks", "faults", "first fault", "replay"])
        for grade in grades:
            full = f"{sum(row.score == row.most for row in grade.rows)} of {len(grade.rows)}"
            first = grade.faults[0] if grade.faults else ""
            table.writerow([grade.student, grade.score, grade.most, full, len(grade.faults), first, grade.replay])
    for grade in grades:
        lines = [f"# {grade.student}: {grade.score:g} of {grade.most:g}", "", grade.replay, ""]
        lines += [f"- **{fault}**" for fault in grade.faults]
        lines += ["", "| | marks | of | |", "|---|---:|---:|---|"]
        lines += [f"| {row.name} | {row.score:g} | {row.most:g} | {in_a_cell(row.words)} |" for row in grade.rows]
        with atomic_write(to / f"{grade.student}.md", "w") as file:
            file.write("\n".join(lines) + "\n")
        tests = [{"name": r.name, "score": r.score, "max_score": r.most, "output": r.words} for r in grade.rows]
        write_json(to / f"{grade.student}.json", {"tests": tests, "output": "\n".join([*grade.faults, grade.replay])})
