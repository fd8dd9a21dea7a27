"""Verifies a finished writeup: that it was made from these notebooks, and these from what their execution left."""

from pathlib import Path

from lmcore.errors import UserError, require
from lmcore.files import temporary_folder
from workbook.record import read_records, unfinished
from workbook.report.contents import read_contents
from workbook.report.writeup import HANDOUTS, documents, executed_notebooks
from workbook.seal import changed_by_hand, notebooks_digest


def writeup_faults(out: Path, only: str = "") -> list[str]:
    """Sentences on what of the executed workbook in `out` does not fit together, the gravest first.

    A notebook that is not done, a cell or a file that is not as its execution left it, a PDF that is not there, is not
    sound, has too many pages, or was made from other notebooks; only the PDF of this name, if one is given.
    """
    records = read_records(out)
    faults = unfinished(records)
    executed = [record.name for record in records if record.state == "done"]
    faults += changed_by_hand(out, executed)
    notebooks = executed_notebooks(out, records)
    made_from = notebooks_digest([*notebooks.values()])
    with temporary_folder("lmcore-verify-") as folder:
        contents = [read_contents(name, notebook, folder) for name, notebook in notebooks.items()]
    for handout in documents(out, records, contents):
        if only not in ("", HANDOUTS[handout].name):
            continue
        file = out / "writeup" / f"{HANDOUTS[handout].name}.pdf"
        try:
            pages, keywords = pages_and_keywords(file)
            others = f"{file} was made from other notebooks than these: run `workbook writeup {out}`."
            require(made_from in keywords, others)
            most = HANDOUTS[handout].most_pages
            require(pages <= most, f"{file} has {pages} pages, and at most {most} are asked for.")
        except UserError as error:
            faults.append(str(error))
    return faults


def pages_and_keywords(file: Path) -> tuple[int, str]:
    """Number of pages and the keywords of a PDF. Raises `UserError` if it is not there or not sound."""
    import pypdf

    require(file.is_file(), f"There is no {file}: run `workbook writeup {file.parents[1]}`.")
    try:
        reader = pypdf.PdfReader(file)
        return len(reader.pages), str((reader.metadata or {}).get("/Keywords", ""))
    except pypdf.errors.PyPdfError as error:
        raise UserError(f"{file} is not a sound PDF ({error}).") from error
