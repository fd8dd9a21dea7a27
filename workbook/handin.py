"""The hand-in that a handout asks for: its answers as a PDF, code.zip with the learning curve, and results.zip.

CSE599-O A1 part 2, section 1.5: code.zip with the code, the scripts and the learning curve, and answers.pdf. CS336: the
same two, the second by the name writeup.pdf. results.zip holds what the answers rest on: executed notebooks, tables,
records of runs, and what one run is replayed from; manifest.json in it has the hash of every file.
"""

import hashlib
import os
import subprocess
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import tyro

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, temporary_folder, write_json
from workbook.parameters import find_project

LEARNING_CURVE = Path("figures") / "recipe_curves.svg"
"""The figure of notebook 02 that is handed in."""

MANIFEST = "manifest.json"

MAX_FILE_BYTES = 5_000_000
"""Larger files are left out: data, or what the code has made."""


def handin(
    out: Annotated[Path, tyro.conf.Positional],
    to: Path = Path("handin"),
    handout: str = "cse599o-a1-part2",
    incomplete: bool = False,
) -> int:
    """Make the hand-in for a handout: its PDF, code.zip as git has the project, results, learning curve.

    Refused, before anything is written, where notebooks, results and PDFs do not fit together. What was left out and
    what is missing is printed.

    Args:
        out: Folder of an executed workbook.
        to: Folder for the hand-in.
        handout: Whose answers: the name of a PDF in OUT/writeup, such as cs336-a1.
        incomplete: Also where something is missing or does not fit together.
    """
    from workbook.report.verify import writeup_faults

    project, notes = find_project(), writeup_faults(out)
    pdf = out / "writeup" / f"{handout}.pdf"
    if not notes and not pdf.is_file():
        notes.append(f"Nothing of {handout} is answered in {out}: there is no {pdf}.")
    require(incomplete or not notes, f"{''.join(notes[:1])} To hand in what there is, say --incomplete.")
    files, left_out = project_files(project, made=(out, to))
    executed = sorted([*(out / "notebooks").glob("*.[ij]*"), *(out / "results").glob("*.*"), *run_records(out)])
    code = {Path("code", name): project / name for name in files}
    if (out / LEARNING_CURVE).is_file():
        code[Path("code", "learning_curve.svg")] = out / LEARNING_CURVE
    else:
        notes.append(f"There is no learning curve: {out / LEARNING_CURVE}.")
    made = [to / "code.zip", to / "results.zip"]
    write_zip(made[0], code)
    held = {Path("results", file.relative_to(out)): file for file in executed}
    hashes = {name.as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for name, file in (code | held).items()}
    with temporary_folder("lmcore-handin-") as folder:
        write_json(folder / MANIFEST, hashes)
        write_zip(made[1], held | {Path(MANIFEST): folder / MANIFEST})
    for name in ("answers.pdf", "writeup.pdf"):
        (to / name).unlink(missing_ok=True)  # of an earlier hand-in
    if pdf.is_file():
        made.append(to / ("answers.pdf" if handout.startswith("cse599o") else "writeup.pdf"))
        with atomic_write(made[-1]) as file:
            file.write(pdf.read_bytes())
    if left_out:
        notes.append(f"Left out, as links or too large: {', '.join(map(str, left_out))}.")
    print("\n".join(f"{file}: {file.stat().st_size / 1e6:.2f} MB" for file in made))
    print("".join(f"Note: {note}\n" for note in notes), end="")
    return 0


def run_records(out: Path) -> list[Path]:
    """Records of the runs in `out`; of the first that has them, the last but one checkpoint with its data as well."""
    files = [path for path in (out / "runs").rglob("*") if path.suffix in (".json", ".jsonl")]
    data = [path for path in (out / "data").rglob("*") if path.is_file()]
    for folder in sorted((out / "runs").glob("*/checkpoints")):
        replayed = [*sorted(folder.glob("step_*.pt"))[-2:-1], folder / "best.safetensors", *data]
        if len(replayed) > len(data) + 1 and sum(path.stat().st_size for path in replayed) <= MAX_FILE_BYTES:
            return files + replayed
    return files


def write_zip(path: Path, files: Mapping[Path, Path]) -> None:
    """An archive of files, by their names there."""
    with (
        atomic_write(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive,
    ):
        for name, source in files.items():
            archive.write(source, name)


def project_files(project: Path, made: Iterable[Path] = ()) -> tuple[list[Path], list[Path]]:
    """The files that are the project, and what was left out of them; relative to it and sorted.

    They are what git tracks or does not ignore, without links and large files; what lies in the folders `made` is not
    the project's. Raises `UserError` where there is no git checkout.
    """
    command = ["git", "-C", project, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise UserError(f"git, which says what belongs to the project, cannot list {project}: {said}.") from None
    kept, left_out = [], []
    for name in sorted({os.fsdecode(name) for name in listed.split(b"\0") if name}):
        path = project / name
        if not os.path.lexists(path) or any(path.resolve().is_relative_to(folder.resolve()) for folder in made):
            continue  # deleted, but not yet in git; or not the project's
        (left_out if path.is_symlink() or path.stat().st_size > MAX_FILE_BYTES else kept).append(Path(name))
    return kept, left_out
