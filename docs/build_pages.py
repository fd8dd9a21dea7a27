"""The book as pages: executed notebooks, guides and the library's documentation. `make pages` and `make workbook` call

    python docs/build_pages.py BOOK TO

BOOK is a folder of executed notebooks; the pages in TO are replaced once the new ones are complete. The variable
SPHINXOPTS holds further options of sphinx-build, such as --fail-on-warning.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from workbook.report.writeup import HANDOUTS

PROJECT = Path(__file__).parents[1]

LINKED = ("docs", "papermill_jobs", "benchmarks", "results", "figures", "tests/adapters.py", "LICENSE")
"""What pages are made of, or link to, beside the Markdown of the project's own folder."""


def main(book: str, to: str) -> int:
    """Builds the pages and says where they are; returns an exit code."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "source"), Path(folder, "pages")
        shutil.copytree(PROJECT / "docs" / "pages", source)
        for path in [*PROJECT.glob("*.md"), *map(PROJECT.joinpath, LINKED)]:
            copy = source / path.relative_to(PROJECT)
            copy.parent.mkdir(exist_ok=True)
            shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
        overview = (source / "README.md").read_text(encoding="utf-8")
        overview = overview.replace("(docs/pages/", "(").replace("(writeup/h200)", "(writeup.md)")
        (source / "README.md").write_text(overview, encoding="utf-8")
        for guide in (source / "guides").glob("*.md"):  # which are two folders deeper in the project
            guide.write_text(guide.read_text(encoding="utf-8").replace("(../../../", "(../"), encoding="utf-8")
        (source / "notebooks").mkdir()
        for notebook in sorted(Path(book).glob("*.ipynb")):
            text = notebook.read_text(encoding="utf-8").replace("(../../../figures/pictures/", "(../figures/pictures/")
            text = re.sub(r'"# (?!\d)', f'"# {notebook.stem.partition("_")[0]} ', text, count=1)  # the title
            (source / "notebooks" / notebook.name).write_text(text, encoding="utf-8")
        write_pdf_page(Path(book), source)
        options = ["-q", "-j", "auto", "-d", str(Path(folder, "doctrees")), *os.environ.get("SPHINXOPTS", "").split()]
        code = build_main([*options, str(source), str(made)])
        if code:
            return code
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(made, to)
    print(f"Pages: {Path(to, 'index.html')}")
    return 0


def write_pdf_page(book: Path, source: Path) -> None:
    """A page that links the PDFs which belong to a book, if there are any: they are copied beside the pages."""
    pdfs = [file for folder in (book.parent, book.parent / "writeup") for file in sorted(folder.glob("*.pdf"))]
    titles = {handout.name: handout.title for handout in HANDOUTS.values()}
    lines = ["# PDFs: what is handed in", "", "The answers to each handout, made from these notebooks.", ""]
    for file in pdfs:
        shutil.copy(file, source / file.name)
        lines.append(f"- [{titles.get(file.stem, file.stem)}]({file.name})")
    if pdfs:
        (source / "writeup.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
