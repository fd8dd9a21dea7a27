"""`workbook writeup` and `handin`: what is made from executed notebooks."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lmcore.errors import EXIT_FAILURE, require


def writeup(out: Annotated[Path, tyro.conf.Positional], check: bool = False) -> int:
    """Make the writeup of an executed workbook again, or check the one that is there. Exit code 1: a notebook lacks.

    Args:
        out: The workbook's folder.
        check: Only verify that PDFs, notebooks, results and runs fit together, and that nothing was changed by hand.
    """
    if check:
        from workbook.report.verify import writeup_faults

        faults = writeup_faults(out)
        require(not faults, "\n".join(faults))
        print(f"Writeup complete: {', '.join(file.name for file in sorted((out / 'writeup').glob('*.pdf')))}.")
        return 0
    from workbook.record import read_records, unfinished
    from workbook.report.writeup import write_writeup

    print("\n".join(f"PDF: {pdf}" for pdf in write_writeup(out)))
    if lacking := unfinished(read_records(out)):
        print("\n".join(lacking), file=sys.stderr)
    return EXIT_FAILURE if lacking else 0


def handin(
    out: Annotated[Path, tyro.conf.Positional],
    to: Path = Path("handin"),
    handout: Literal[
        "cse599o-a1-part1", "cse599o-a1-part2", "cs336-a1", "cs336-a2-2025", "cs336-a2-2026", "wikitext103-report"
    ] = "cse599o-a1-part2",
    incomplete: bool = False,
) -> int:
    """Make the hand-in for a handout: its PDF, code.zip without data, checkpoints or secrets, results, learning curve.

    Args:
        out: Folder of an executed workbook.
        to: Folder for the hand-in.
        handout: Whose answers: the name of a PDF in OUT/writeup.
        incomplete: Also where something is missing or does not fit together.
    """
    from workbook.handin import make_handin
    from workbook.parameters import find_project

    print("\n".join(make_handin(find_project(), out, to, handout, incomplete)))
    return 0
