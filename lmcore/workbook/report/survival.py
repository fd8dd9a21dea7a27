"""What the fault suite has found (tests/faults), as the README shows it."""

import os
import re

import pandas as pd

from lmcore.errors import require
from lmcore.files import read_json

COLUMNS = {"kind": "fault", "tried": "tried", "survived": "survived", "refused_in_words": "refused", "lost": "lost"}

FAMILIES = {
    "SIGKILL at a random moment": r"SIGKILL .*random moment",
    "SIGKILL at every kind of file operation of a save": r"SIGKILL (just before|in the middle)",
    "checkpoints and weights truncated, with flipped bits or lost": r".*(checkpoint|safetensors)",
    "metrics damaged": r"metrics",
    "status, configuration or environment damaged": r"\w+\.json damaged",
    "disk full, or a limit on the size of files": r"disk full|limit on",
    "several processes at once, one of them killed": r"two |.* is killed",
    "stop signals": r"SIG(USR1|TERM)",
}
"""Kinds of faults that the README counts together; a kind that matches none has a row of its own."""


def family(kind: str) -> str:
    """The row of the README that counts this kind of fault."""
    return next((name for name, pattern in FAMILIES.items() if re.match(pattern, kind)), kind)


def faults_block(file: str | os.PathLike) -> str:
    """The table of results/faults.json and what its columns mean, as Markdown. Raises `UserError` if it is damaged."""
    report = read_json(file)
    rows = report.get("faults") if isinstance(report, dict) else None
    require(
        isinstance(rows, list) and bool(rows) and all(COLUMNS.keys() <= row.keys() for row in rows),
        f"{file} is not a report of the fault suite: make it with pytest -m faults tests/faults --faults-report.",
    )
    table = pd.DataFrame(rows)[list(COLUMNS)].rename(columns=COLUMNS)
    table = table.groupby(table["fault"].map(family), sort=False).sum(numeric_only=True).reset_index()
    total, source = table.drop(columns="fault").sum(), report["provenance"]
    return (
        f"{total['tried']:,} faults were tried on training runs: {total['survived']:,} survived, {total['refused']:,} "
        f"refused, {total['lost']:,} lost. Survived: the same command went on and ended with the weights and metrics "
        "of an undisturbed run, bit for bit. Refused: it stopped with a sentence that names the cause, and ended the "
        f"same once that was mended. On a CPU, PyTorch {source['torch']}, commit {str(source['git_commit'])[:12]} "
        "([record](results/faults.json), by kind; `make test-faults` tries them again).\n\n"
        f"{table.to_markdown(index=False)}\n"
    )
