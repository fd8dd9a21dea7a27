"""The rows of `lmcore jobs` as a table for a terminal, and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from lmcore.workbook.jobs.progress import format_duration
from lmcore.workbook.jobs.status import ACTIVE, JobStatus

WIDTH = 120
COLUMNS = {"job": 16, "name": 20, "state": 13, "tries": 5, "left": 10}
"""Columns and their widths; what the job does has the rest of the line."""

GAP = "  "
TAIL_LINES = 3
"""So many lines of the table a line of a log has at most."""


def as_text(rows: Sequence[JobStatus], fault: str | None) -> str:
    """A table for each output folder; below a job's row what there is to say of it, its log, and the log's end."""
    lines = [fault] if fault else []
    for out in dict.fromkeys(row.out for row in rows):
        lines += [""] * bool(lines) + [
            out,
            GAP.join(f"{name.upper():<{n}}" for name, n in COLUMNS.items()) + GAP + "DOING",
        ]
        for row in rows:
            lines += lines_of(row) if row.out == out else []
    return "\n".join(line.rstrip() for line in lines)


def lines_of(row: JobStatus) -> list[str]:
    """A job's lines."""
    left = (
        "" if row.state not in ACTIVE else "unknown" if row.seconds_left is None else format_duration(row.seconds_left)
    )
    tries = "" if not row.attempts else str(row.attempts)
    values = (row.id, row.name, row.state, tries, left)
    head = (
        GAP.join(f"{cut(value, width):<{width}}" for value, width in zip(values, COLUMNS.values(), strict=True)) + GAP
    )
    doing = textwrap.wrap(row.doing, WIDTH - len(head)) or [""]
    lines = [head + doing[0], *(" " * len(head) + more for more in doing[1:])]
    for note in row.notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    if row.log:
        lines.append(f"    log: {row.log}")  # whole, also where it is longer than the line: it is to be copied
    said = [
        part for line in row.tail for part in textwrap.wrap(line, WIDTH - 6, max_lines=TAIL_LINES, placeholder=" …")
    ]
    return [*lines, *(f"    | {part}" for part in said)]


def cut(text: str, width: int) -> str:
    """The text, shortened where it is wider."""
    return text if len(text) <= width else text[: width - 1] + "…"


def as_json(rows: Sequence[JobStatus], fault: str | None) -> str:
    """Everything that the rows hold: {"slurm": null or why it could not be asked, "jobs": [...]}."""
    return json.dumps({"slurm": fault, "jobs": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False)
