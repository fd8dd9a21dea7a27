"""Which problems of the handouts the notebooks answer.

`python -m lmcore.workbook.report.coverage` writes docs/coverage.md. `problems.csv` has every problem, its place and its
parts. An answer counts for each handout that has the problem, unless its part names one, as does
`answer("memory_profiling (c, CS336)", …)`.
"""

import csv
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import pandas as pd

from lmcore.files import atomic_write
from lmcore.workbook.notebook import code_cells, read_notebook

PAGE = Path("docs/coverage.md")


def answers_in(notebooks: Iterable[Path]) -> dict[str, list[str]]:
    """Answered problems, as "problem" or "problem (part)", with the notebooks that answer them."""
    found: dict[str, list[str]] = {}
    for path in notebooks:
        for _, cell in code_cells(read_notebook(path)):
            for answered in re.findall(r'^ *answer\(\s*"([^"]+)"', cell.source, flags=re.MULTILINE):
                found.setdefault(answered, []).append(path.stem)
    return found


def coverage(answers: dict[str, list[str]]) -> pd.DataFrame:
    """Every problem: handout, problem, place, answered (yes, its parts, or not yet), and the notebooks."""
    rows = []
    text = resources.files("lmcore.workbook.report").joinpath("problems.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        parts, notebooks = set(), set()
        for answered, places in answers.items():
            problem, _, label = answered.rstrip(")").partition(" (")
            part, _, handout = label.partition(", ")
            of_this = not handout.startswith(("CS336", "CSE599-O")) or row["handout"].startswith(handout)
            if problem == row["problem"] and of_this:
                parts.add(part)
                notebooks |= set(places)
        wanted = row["parts"].split()
        done = [part for part in wanted if part in parts or parts == {""}]
        some = f"{', '.join(done)} of {', '.join(wanted)}" if done else "not yet"
        answered = "yes" if notebooks and done == wanted else some
        rows.append({**row, "answered": answered, "notebooks": ", ".join(sorted(notebooks))})
    return pd.DataFrame(rows)


def counts(table: pd.DataFrame) -> pd.DataFrame:
    """Problems of each handout, and how many are answered in full."""
    full = (table["answered"] == "yes").groupby(table["handout"], sort=False)
    return full.agg(problems="size", answered="sum").reset_index()


def page(table: pd.DataFrame) -> str:
    """The table as a page of Markdown, a section for each handout."""
    text = [
        "# The problems of the handouts, and where they are answered",
        "Written by `python -m lmcore.workbook.report.coverage` from the notebooks. A place is a page or "
        "a section of the handout.",
        counts(table).to_markdown(index=False),
    ]
    for handout, part in table.groupby("handout", sort=False):
        shown = part.drop(columns=["handout", "parts"]).assign(problem=part["problem"].map("`{}`".format))
        text += [f"## {handout}", shown.to_markdown(index=False)]
    return "\n\n".join(text) + "\n"


if __name__ == "__main__":
    with atomic_write(PAGE, "w") as file:
        file.write(page(coverage(answers_in(sorted(Path("notebooks").glob("*.ipynb"))))))
