"""`workbook grade`: one table for the course, a rubric for each student, and Gradescope's results.json."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, read_json, sha256_file, temporary_folder, write_json
from workbook.grading.archives import unpack
from workbook.grading.exercises import Checks, checks_of, grade_exercises
from workbook.grading.limits import Limits
from workbook.grading.recompute import different_answers, different_cells, execute_again, replayed
from workbook.handin import MANIFEST
from workbook.record import read_records
from workbook.report.contents import read_contents
from workbook.report.coverage import DONE, OPEN, Answered, coverage
from workbook.report.verify import writeup_faults
from workbook.report.writeup import HANDOUTS, executed_notebooks, in_a_cell
from workbook.seal import file_hashes


class Row(NamedTuple):
    """One line of a rubric: an exercise or a problem, its marks, and why; by the names of Gradescope's tests."""

    name: str
    score: float
    max_score: float
    output: str


@dataclass
class Grade:
    """What a hand-in is worth, what of it does not fit together, and what else a teacher should look at."""

    student: str
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of tables and logs of losses, by their paths."""


def grade_course(handins: Path, to: Path, project: Path, handout: str, limits: Limits, at_once: int = 2) -> list[Grade]:
    """Grades each hand-in in the folder `handins` (a folder or an archive each) for a handout, by its PDF's name.

    Writes grades.csv, and NAME.md and NAME.json for each, into `to`. A hand-in that cannot be read has no marks and a
    sentence; the others are graded all the same.
    """
    found = sorted(path for path in handins.iterdir() if path.is_dir() or path.suffix == ".zip")
    require(bool(found), f"There is no hand-in in {handins}: a folder or an archive for each student.")
    checks = {path.stem: checks_of(path) for path in sorted((project / "notebooks").glob("*.ipynb"))}
    grades = [Grade(path.stem) for path in found]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda grade, path: _grade(grade, path, project, handout, checks, limits), grades, found))
    ours = {sha256_file(path): "the workbook itself" for path in (project / "results").glob("*/*.json")}
    for grade in grades:
        others = ours | {digest: of.student for of in grades if of is not grade for digest in of.files.values()}
        shared = [path for path, digest in grade.files.items() if digest in others]
        grade.faults += [f"{path} is the very file of {others[grade.files[path]]}." for path in shared[:1]]
    write_grades(grades, to)
    return grades


def _grade(grade: Grade, handin: Path, project: Path, handout: str, checks: dict[str, Checks], limits: Limits) -> None:
    """Adds rows, faults and notes."""
    with temporary_folder("lmcore-handin-") as unpacked:
        try:
            folder = unpack(handin, unpacked)
            out, wrong = folder / "results", {}
            records = read_records(out)
            notebooks = executed_notebooks(out, records)
            hashes = dict(file_hashes(out))
            grade.files = {path: hashes[path] for path in hashes if path.startswith("results/") or "metrics" in path}
            grade.faults += _manifest_faults(folder)
            for pdf in folder.glob("*.pdf"):
                (out / "writeup").mkdir(exist_ok=True)
                pdf.rename(out / "writeup" / f"{handout}.pdf")
            grade.faults += [fault.replace(f"{folder}/", "") for fault in writeup_faults(out, handout)]
            for record in (record for record in records if record.name in notebooks.keys() & checks.keys()):
                name, executed = record.name, notebooks[record.name]
                verdicts = grade_exercises(out / "notebooks" / f"{name}.ipynb", checks[name], limits)
                grade.rows += [
                    Row(each, float(verdict.passed), 1.0, verdict.words) for each, verdict in verdicts.items()
                ]
                again, fault = execute_again(out, record, executed, project, limits)
                different = different_answers(executed, again)
                grade.faults += [*([fault] if fault else []), *different.values()]
                wrong |= different
                if shown := record.parameters and record.parameters.get("records"):
                    grade.notes.append(f"Notebook {name} shows the tables of {shown}.")
                if not fault and (cells := ", ".join(different_cells(executed, again))):
                    grade.notes.append(f"Look at notebook {name}: executed again, cells {cells} show something else.")
            contents = [read_contents(name, notebook, folder) for name, notebook in notebooks.items()]
            grade.rows += _problems(handout, [answer for each in contents for answer in each.answers], wrong)
            same, sentence = replayed(out, limits)
            (grade.notes if same else grade.faults).append(sentence)
        except UserError as error:
            grade.faults.append(str(error))
        except Exception as error:  # a hand-in that breaks the grader costs its own row
            grade.faults.append(f"It cannot be graded: {type(error).__name__}: {error}")


def _manifest_faults(folder: Path) -> Iterator[str]:
    """A sentence for each file that is not as the hand-in was made."""
    require((folder / MANIFEST).is_file(), f"There is no {MANIFEST}: make the hand-in with `make handin`.")
    for name, digest in read_json(folder / MANIFEST).items():
        if not (folder / name).is_file():
            yield f"{name} is gone from the hand-in."
        elif sha256_file(folder / name) != digest:
            yield f"{name} was changed after the hand-in was made."


def _problems(handout: str, answers: Iterable[Answered], wrong: dict[str, str]) -> Iterator[Row]:
    """The handout's problems: half the marks where a part is missing, none where its answer is not what tables give."""
    for problem in coverage(answers):
        if HANDOUTS[problem.handout].name == handout:
            most = float(problem.points or 1)
            names = [f"{answer.problem} {answer.part}".strip() for answer in problem.answers]
            faults = [wrong[name] for name in names if name in wrong]
            share = 0.0 if faults else {DONE: 1.0, OPEN: 0.0}.get(problem.state, 0.5)
            yield Row(problem.name, share * most, most, (faults or [problem.missing or problem.state])[0])


def write_grades(grades: list[Grade], to: Path) -> None:
    """Writes the table of the course, and for each student a rubric and what Gradescope reads."""
    table = []
    for grade in grades:
        rows = pd.DataFrame(grade.rows, columns=Row._fields)
        score, most = rows["score"].sum(), rows["max_score"].sum()
        full = f"{(rows['score'] == rows['max_score']).sum()} of {len(rows)}"
        counts = {"rows with full marks": full, "faults": len(grade.faults)}
        sentences = {"first fault": "".join(grade.faults[:1]), "notes": " ".join(grade.notes)}
        table.append({"student": grade.student, "score": score, "of": most} | counts | sentences)
        output = "\n".join(grade.faults + grade.notes)
        write_json(to / f"{grade.student}.json", {"tests": rows.to_dict("records"), "output": output})
        lines = [f"# {grade.student}: {score:g} of {most:g}", "", *(f"- **{fault}**" for fault in grade.faults)]
        lines += [*(f"- {note}" for note in grade.notes), ""]
        lines += [rows.assign(output=rows["output"].map(in_a_cell)).to_markdown(index=False), ""]
        with atomic_write(to / f"{grade.student}.md", "w") as file:
            file.write("\n".join(lines))
    with atomic_write(to / "grades.csv", "w") as file:
        pd.DataFrame(table).to_csv(file, index=False)
