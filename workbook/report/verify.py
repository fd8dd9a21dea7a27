"""Verifies a finished writeup from the outside: the files, not the code that made them."""

import re
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import temporary_folder
from workbook.record import read_record
from workbook.report.document import NotebookDocument
from workbook.report.writeup import HTML_NAME, PDF_NAME, read_documents


def check_writeup(out: str | Path) -> dict[str, int]:
    """Verifies the writeup of the executed workbook in `out`; returns counts of its notebooks, figures and PDF pages.

    Raises `UserError` with the first thing that is wrong: a file missing or broken, a notebook failed or absent, a
    figure or an answer lost, an error shown, LaTeX left raw. Reads the PDF with pypdf (the `dev` extra).
    """
    out = Path(out)
    record, html_file, pdf_file = read_record(out), out / "writeup" / HTML_NAME, out / "writeup" / PDF_NAME
    for file in (html_file, pdf_file):
        require(file.is_file(), f"The writeup lacks {file}.")
    html = html_file.read_text(encoding="utf-8")
    for entry in record["notebooks"]:
        require(entry["state"] == "done", f"Notebook {entry['name']} is not complete: its state is {entry['state']!r}.")
    with temporary_folder("lmcore-verify-") as folder:
        documents = read_documents(out, record, Path(folder))
    figures = sum(document.figures for document in documents)
    shown = len(re.findall(r'<img[^>]+src="data:image/', html))
    require(figures > 0, "The executed notebooks hold no figure.")
    require(shown == figures, f"{html_file} shows {shown} of {figures} figures.")
    require('class="failure"' not in html, f"{html_file} shows a failed cell.")
    outside = re.search(r'<(?:img|script|link)[^>]+(?:src|href)="(?!data:|#)([^"]*)"', html)
    require(outside is None, f"{html_file} needs {outside and outside[1]} from outside.")
    raw = re.search(r'<span class="math[^>]*>(?!\s*<math)[^<]{0,60}', html)
    require(raw is None, f"{html_file} shows raw LaTeX: {raw and raw[0].partition('>')[2]}.")
    for identifier in [d.name for d in documents] + [a.identifier for d in documents for a in d.answers]:
        require(f'id="{identifier}"' in html, f"{html_file} lacks the part {identifier!r}.")
    return {"notebooks": len(documents), "figures": figures, "pages": _check_pdf(pdf_file, documents, figures)}


def _check_pdf(file: Path, documents: list[NotebookDocument], figures: int) -> int:
    """Number of pages of a sound PDF that has every notebook's title and as many pictures as there are figures."""
    try:
        import pypdf
    except ImportError:
        raise UserError("Checking the PDF needs pypdf: pip install -e .[dev].") from None
    try:
        reader = pypdf.PdfReader(file)
        chapters = [entry for entry in reader.outline if not isinstance(entry, list)]  # to read all pages takes minutes
        begins = map(reader.get_destination_page_number, chapters)
        text = " ".join(reader.pages[number].extract_text() for number in begins if number is not None)
        pictures = _count_figures(reader.trailer["/Root"].get("/StructTreeRoot"))
    except pypdf.errors.PyPdfError as error:
        raise UserError(f"{file} is not a sound PDF ({error}).") from error
    squeezed = re.sub(r"\W+", "", text)
    for document in documents:
        require(re.sub(r"\W+", "", document.title) in squeezed, f"{file} lacks the notebook {document.title!r}.")
    require(pictures == figures, f"{file} shows {pictures} of {figures} figures.")
    return len(reader.pages)


def _count_figures(element: Any) -> int:
    """Pictures in the structure tree of a tagged PDF: a vector drawing leaves no other trace in the file."""
    element = element.get_object() if hasattr(element, "get_object") else element
    if isinstance(element, list):
        return sum(_count_figures(child) for child in element)
    if not isinstance(element, dict):
        return 0
    return (element.get("/S") == "/Figure") + _count_figures(element.get("/K"))
