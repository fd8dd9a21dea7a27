"""Verifies a finished writeup from the outside: the file, not the code that made it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import temporary_folder
from workbook.record import read_records, unfinished
from workbook.report.writeup import PDF_NAME, read_documents


def writeup_faults(out: Path) -> list[str]:
    """Sentences on what is wrong with the writeup in `out` before one looks into it, the gravest first."""
    pdf = out / "writeup" / PDF_NAME
    if not pdf.is_file():
        return [f"There is no writeup {pdf}: run `workbook run --out {out}` first, or `workbook writeup {out}`."]
    newer = [path.stem for path in (out / "notebooks").glob("*.ipynb") if path.stat().st_mtime > pdf.stat().st_mtime]
    old = f"The writeup {pdf} is older than notebook {min(newer, default='')}: run `workbook writeup {out}`."
    return unfinished(read_records(out)) + ([old] if newer else [])


def check_writeup(out: str | Path) -> dict[str, int]:
    """Verifies the writeup of the executed workbook in `out`; returns counts of notebooks, figures, answers and pages.

    Raises `UserError` with the first thing that is wrong: the file missing, broken or older than a notebook, a notebook
    that failed or was not run, a notebook, a figure or an answer that the PDF lacks.
    """
    out, pdf = Path(out), Path(out, "writeup", PDF_NAME)
    faults = writeup_faults(out)
    require(not faults, "".join(faults[:1]))
    with temporary_folder("lmcore-verify-") as folder:
        documents = read_documents(out, read_records(out), Path(folder))
    answers = [answered.label for document in documents for answered in document.answers]
    figures = sum(document.figures for document in documents)
    require(figures > 0, "The executed notebooks hold no figure.")
    shown, titles, pages = _contents(pdf)
    for title in (*(document.title for document in documents), *(f"Answer: {label}" for label in answers)):
        require(_squeezed(title) in titles, f"{pdf} lacks {title!r}.")
        titles.remove(_squeezed(title))
    require(shown == figures, f"{pdf} shows {shown} of {figures} figures.")
    return {"notebooks": len(documents), "figures": figures, "answers": len(answers), "pages": pages}


def _contents(file: Path) -> tuple[int, list[str], int]:
    """Number of pictures, titles of all parts, and number of pages of a PDF; `UserError` if it is not sound."""
    import pypdf

    try:
        reader = pypdf.PdfReader(file)
        pictures = _count_figures(reader.trailer["/Root"].get("/StructTreeRoot"))
        return pictures, [_squeezed(title) for title in _titles(reader.outline)], len(reader.pages)
    except pypdf.errors.PyPdfError as error:
        raise UserError(f"{file} is not a sound PDF ({error}).") from error


def _titles(outline: list) -> Iterator[str]:
    for entry in outline:
        if isinstance(entry, list):
            yield from _titles(entry)
        else:
            yield entry.title


def _squeezed(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)


def _count_figures(element: Any) -> int:
    """Pictures in the structure tree of a tagged PDF: a vector drawing leaves no other trace in the file."""
    element = element.get_object() if hasattr(element, "get_object") else element
    if isinstance(element, list):
        return sum(_count_figures(child) for child in element)
    if not isinstance(element, dict):
        return 0
    return (element.get("/S") == "/Figure") + _count_figures(element.get("/K"))
