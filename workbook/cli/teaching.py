"""`workbook student` and `grade`: a course held with the workbook."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.errors import require


def student(to: Annotated[Path, tyro.conf.Positional] = Path("student")) -> int:
    """Write the edition for students: no solutions, outputs, answers or results of ours.

    Args:
        to: The new folder.
    """
    from workbook.parameters import find_project
    from workbook.student import make_student

    made = make_student(find_project(), to)
    print(f"{to}: {len(made)} files, of which {sum(name.suffix == '.ipynb' for name in made)} are notebooks.")
    return 0


def grade(
    handins: Annotated[Path, tyro.conf.Positional],
    to: Path = Path("grades"),
    handout: str = "cse599o-a1-part2",
    seconds: float = 120.0,
    memory_gb: float = 6.0,
    at_once: int = 2,
) -> int:
    """Grade a folder of hand-ins: exercises run again, answers from tables, tables from records, training replayed.

    Args:
        handins: A folder with a folder or an archive for each student.
        to: Where the course's table, rubrics and Gradescope's files go.
        handout: Whose problems: the name of a PDF.
        seconds: For one exercise; a notebook may take five times as long.
        memory_gb: For one process of a hand-in, PyTorch's own two included.
        at_once: Hand-ins that are graded at the same time.
    """
    from workbook.grading.exercises import Limits
    from workbook.grading.grade import grade_course
    from workbook.parameters import find_project
    from workbook.report.writeup import HANDOUTS

    names = [each.name for each in HANDOUTS.values()]
    require(handins.is_dir(), f"There is no folder {handins}.")
    require(handout in names, f"handout is one of {', '.join(names)}, not {handout!r}.")
    require(seconds > 0 and memory_gb > 0 and at_once > 0, "seconds, memory_gb and at_once must be positive.")
    limits = Limits(int(memory_gb * 1e9), seconds)
    grades = grade_course(handins, to, find_project(), handout, limits, at_once)
    for each in grades:
        print(f"{each.student}: {each.score:g} of {each.most:g}{'; ' + each.faults[0] if each.faults else ''}")
    print(f"Grades: {to / 'grades.csv'}")
    return 0
