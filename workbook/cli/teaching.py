"""`workbook grade`: the hand-ins of a course held with the workbook."""

from pathlib import Path
from typing import Annotated

import tyro

from lmcore.errors import require
from workbook.grading.limits import Limits

LIMITS = Limits()


def grade(
    handins: Annotated[Path, tyro.conf.Positional],
    to: Path = Path("grades"),
    handout: str = "cse599o-a1-part2",
    limits: Annotated[Limits, tyro.conf.arg(name="")] = LIMITS,
    at_once: int = 2,
) -> int:
    """Grade a folder of hand-ins: exercises run again, answers from tables, tables from records, training replayed.

    Args:
        handins: A folder with a folder or an archive for each student.
        to: Where the course's table, rubrics and Gradescope's files go.
        handout: Whose problems: the name of a PDF.
        limits: Of the code of a hand-in.
        at_once: Hand-ins that are graded at the same time.
    """
    import pandas as pd

    from workbook.grading.grade import grade_course
    from workbook.parameters import find_project
    from workbook.report.writeup import HANDOUTS

    names = [each.name for each in HANDOUTS.values()]
    require(handins.is_dir(), f"There is no folder {handins}.")
    require(handout in names, f"handout is one of {', '.join(names)}, not {handout!r}.")
    require(min(limits.seconds, limits.memory, at_once) > 0, "seconds, memory and at_once must be positive.")
    grade_course(handins, to, find_project(), handout, limits, at_once)
    table = pd.read_csv(to / "grades.csv")[["student", "score", "of", "first fault"]].fillna("")
    print(table.to_markdown(index=False))
    print(f"Grades: {to / 'grades.csv'}")
    return 0
