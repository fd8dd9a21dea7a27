"""What the fault suite has found (tests/faults), as the README shows it."""

import os

import pandas as pd

from lmcore.config import require
from lmcore.files import read_json

COLUMNS = {"kind": "fault", "tried": "tried", "survived": "survived", "refused_in_words": "refused", "lost": "lost"}


def faults_block(file: str | os.PathLike) -> str:
    """The table of results/faults.json and what its columns mean, as Markdown. Raises `UserError` if it is damaged."""
    report = read_json(file)
    rows = report.get("faults") if isinstance(report, dict) else None
    require(
        isinstance(rows, list) and bool(rows) and all(COLUMNS.keys() <= row.keys() for row in rows),
        f"{file} is not a report of the fault suite: make it with pytest -m faults tests/faults --faults-report.",
    )
    table = pd.DataFrame(rows)[list(COLUMNS)].rename(columns=COLUMNS)
    total, source = table.drop(columns="fault").sum(), report["provenance"]
    return (
        f"{total['tried']:,} faults were tried on training runs: {total['survived']:,} survived, {total['refused']:,} "
        f"refused, {total['lost']:,} lost. Survived: the same command went on and ended with the weights and metrics "
        "of an undisturbed run, bit for bit. Refused: it stopped with a sentence that names the cause, and ended the "
        f"same once that was mended. On a CPU, PyTorch {source['torch']}, commit {str(source['git_commit'])[:12]} "
        "([record](results/faults.json); `make test-faults` tries them again).\n\n"
        f"{table.to_markdown(index=False)}\n"
    )
