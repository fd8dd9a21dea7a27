"""`workbook run`, `writeup` and `handin`: the notebooks, executed, and what is made from them."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lmcore.errors import EXIT_FAILURE, EXIT_INTERRUPTED


def run(
    scale: str = "smoke",
    data: str = "embedded",
    out: Path | None = None,
    notebooks: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    resume: bool = False,
    writeup: bool = True,
    stop_seconds: float = 100.0,
) -> int:
    """Execute the notebooks in order and make the writeup. Exit codes: 1 a notebook failed, 75 stopped by a signal.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop it where nothing is lost; a second SIGINT or SIGTERM ends the command and
    its notebooks at once: 130, 143.

    Args:
        scale: smoke, laptop or gpu: a folder in papermill_jobs/parameters/.
        data: embedded, a corpus to download (tinystories, ...), or a text file, a folder of text, a prepared corpus.
        out: Folder for everything that is made (default: runs/<scale>).
        notebooks: Only these, by number or name.
        parameters: name=value pairs that override notebook parameters of that name; values are Python literals or text.
        resume: Keep the notebooks that are done with the same scale, data, parameters and cells.
        writeup: Make the writeup, too.
        stop_seconds: How long training may take to save itself after a signal.
    """
    from workbook.parameters import parse_overrides
    from workbook.run import run_workbook

    chosen = parse_overrides(parameters)
    records, pdfs = run_workbook(scale, data, out, notebooks, chosen, resume, writeup, stop_seconds)
    print("".join(f"PDF: {pdf}\n" for pdf in pdfs), end="")
    notebook = next((record for record in records if record.unfinished), None)
    if notebook is None:
        return 0
    resumes = "" if notebook.state == "failed" else " The same command with --resume resumes from there."
    print(f"workbook: {notebook.unfinished}{resumes}", file=sys.stderr)
    return EXIT_FAILURE if notebook.state == "failed" else EXIT_INTERRUPTED


def writeup(out: Annotated[Path, tyro.conf.Positional], check: bool = False, to: Path | None = None) -> int:
    """Make the writeup of an executed workbook again, or check the one that is there. Exit code 1: a notebook lacks.

    Args:
        out: The workbook's folder.
        check: Only verify that PDFs, notebooks, results and runs fit together, and that nothing was changed by hand.
        to: Also copy them into this folder, to be committed: with the figures, and the notebooks with their pictures.
    """
    if to is not None:
        from workbook.publish import publish

        files = publish(out, to)
        print(f"{to}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB.")
        return 0
    if check:
        from workbook.report.verify import check_writeup

        found = check_writeup(out)
        print("Writeup complete: " + ", ".join(f"{count} {name}" for name, count in found.items()) + ".")
        return 0
    from workbook.record import read_records, unfinished
    from workbook.report.writeup import write_writeup

    print("\n".join(f"PDF: {pdf}" for pdf in write_writeup(out)))
    if lacking := unfinished(read_records(out)):
        print("\n".join(lacking), file=sys.stderr)
    return EXIT_FAILURE if lacking else 0


def handin(
    out: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[OUT]", help_behavior_hint="")] = None,
    to: Path = Path("handin"),
    handout: Literal[
        "cse599o-a1-part1", "cse599o-a1-part2", "cs336-a1", "cs336-a2-2025", "cs336-a2-2026", "wikitext103-report"
    ] = "cse599o-a1-part2",
    incomplete: bool = False,
) -> int:
    """Make the hand-in for a handout: its PDF, code.zip without data, checkpoints or secrets, results, learning curve.

    Args:
        out: Folder of an executed workbook (default: that in runs/ whose writeup was made last).
        to: Folder for the hand-in.
        handout: Whose answers: the name of a PDF in OUT/writeup.
        incomplete: Also where something is missing or does not fit together.
    """
    from workbook.handin import make_handin, newest_writeup
    from workbook.parameters import find_project

    project = find_project()
    print("\n".join(make_handin(project, out or newest_writeup(project / "runs"), to, handout, incomplete)))
    return 0
