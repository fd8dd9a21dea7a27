"""The hand-in that the handouts ask for: code.zip, the answers as a PDF, and the learning curve.

CSE599-O A1 part 2, section 1.5: code.zip with the code, the scripts and the learning curve, and answers.pdf. CS336: the
same two, the second by the name writeup.pdf.
"""

import os
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from lmcore.errors import UserError, require
from lmcore.files import atomic_write
from lmcore.workbook.project_files import project_files, refuse_secrets

Names = Literal["cse599o", "cs336"]

PDF_NAMES: dict[str, str] = {"cse599o": "answers.pdf", "cs336": "writeup.pdf"}
"""What each course calls the answers."""

CODE_NAME, CURVE_NAME = "code.zip", "learning_curve.svg"
ROOT_FOLDER = "code"
"""Folder that code.zip unpacks to."""

LEARNING_CURVES = ("recipe_curves.svg", "learning_rate_curves.svg")
"""Figures of notebook 02; handed in is the first that is there: the curves of the recipes, or those of the sweep."""

ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""The time of every file in code.zip, so that the same files make the same archive."""

NAMES_SHOWN = 4


@dataclass
class Submission:
    """What was handed in, and what was not."""

    out: Path
    files: list[Path] = field(default_factory=list)
    """Files of the project in code.zip, relative to the project."""
    written: list[Path] = field(default_factory=list)
    """Files of the hand-in."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names of what was left out, by the reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what the hand-in lacks."""


def make_submission(
    project: Path, out: Path, to: Path, names: Names = "cse599o", incomplete: bool = False
) -> Submission:
    """Writes the hand-in of the workbook executed in `out` into the folder `to`; with `incomplete` what there is of it.

    Raises `UserError`, before anything is written, where the writeup is missing, older than its notebooks or reports a
    failure, and where a file holds what looks like a key.
    """
    done = Submission(out=out, notes=writeup_faults(out))
    require(incomplete or not done.notes, f"{''.join(done.notes[:1])} To hand in what there is, say --incomplete.")
    done.files, done.left_out = project_files(project, excluded=(out, to))
    require(bool(done.files), f"There are no files of the project in {project}.")
    writeup = out / "writeup"
    refuse_secrets([*(project / file for file in done.files), *writeup.glob("answers.html")])
    curve = next((out / "figures" / name for name in LEARNING_CURVES if (out / "figures" / name).is_file()), None)
    if curve is None:
        done.notes.append(f"There is no learning curve ({' or '.join(LEARNING_CURVES)}) in {out / 'figures'}.")
    with atomic_write(to / CODE_NAME) as file:
        write_zip(file, project, done.files, curve)
    other_names = {*PDF_NAMES.values()} - {PDF_NAMES[names]}
    copies = {to / PDF_NAMES[names]: writeup / "answers.pdf", to / CURVE_NAME: curve}
    copies |= {to / name: None for name in other_names}
    done.written = [to / CODE_NAME, *(target for target, source in copies.items() if copy(source, target))]
    return done


def copy(source: Path | None, target: Path) -> bool:
    """Copies the file; without one, removes the target, which an earlier hand-in has left. Whether there is one now."""
    if source is None or not source.is_file():
        target.unlink(missing_ok=True)
        return False
    with open(source, "rb") as original, atomic_write(target) as file:
        shutil.copyfileobj(original, file)
    return True


def writeup_faults(out: Path) -> list[str]:
    """Sentences on what keeps the writeup in `out` from being handed in, the gravest first."""
    from lmcore.workbook.record import read_record, unfinished
    from lmcore.workbook.report.writeup import PDF_NAME

    pdf = out / "writeup" / PDF_NAME
    if not pdf.is_file() or not pdf.read_bytes().startswith(b"%PDF"):
        return [f"There is no writeup {pdf}: run `lmcore workbook --out {out}` first, or `lmcore writeup {out}`."]
    faults = unfinished(read_record(out))
    newer = [path.stem for path in (out / "notebooks").glob("*.ipynb") if path.stat().st_mtime > pdf.stat().st_mtime]
    if newer:
        faults.append(f"The writeup {pdf} is older than notebook {min(newer)}: run `lmcore writeup {out}`.")
    return faults


def write_zip(file: IO[bytes], project: Path, files: Sequence[Path], curve: Path | None) -> None:
    """The archive: sorted, with one fixed time, and of the permissions only whether a file is a program."""
    sources = {name.as_posix(): project / name for name in files} | ({CURVE_NAME: curve} if curve else {})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, source in sorted(sources.items()):
            entry = zipfile.ZipInfo(f"{ROOT_FOLDER}/{name}", ZIP_TIME)
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = (0o100755 if os.access(source, os.X_OK) else 0o100644) << 16
            archive.writestr(entry, source.read_bytes())


def newest_writeup(places: Sequence[Path]) -> Path:
    """The output folder in one of these whose writeup was made last. Raises `UserError` where there is none."""
    found = [path for place in places for path in place.glob("*/writeup/answers.pdf") if path.is_file()]
    if not found:
        where = " or ".join(f"{place}/" for place in places)
        raise UserError(f"No workbook has left a writeup in {where}: run `make workbook` first, or name its folder.")
    return max(found, key=lambda path: path.stat().st_mtime).parents[1]


def describe(done: Submission) -> str:
    """What went in, what was left out and why, and what is missing, as lines."""
    lines = [f"From {done.out}:"]
    for path in done.written:
        inside = f", {len(done.files)} files of the project" if path.name == CODE_NAME else ""
        lines.append(f"  {path}: {path.stat().st_size / 1e6:.2f} MB{inside}")
    for reason, names in sorted(done.left_out.items()):
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        shown = names if reason == "named like a secret" else names[:NAMES_SHOWN]
        lines.append(f"Left out, {reason}: {', '.join(shown)}{more if shown != names else ''}")
    return "\n".join([*lines, *(f"Note: {note}" for note in done.notes)])
