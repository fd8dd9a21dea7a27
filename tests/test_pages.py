"""The book as pages: the library's documentation, the guides, and executed notebooks."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

pytest.importorskip("sphinx", reason="Sphinx, which makes the pages, is not installed")

ROOT = Path(__file__).parents[1]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a book of one notebook, without a warning: every docstring is markup that Sphinx understands."""
    folder = tmp_path_factory.mktemp("book")
    outputs = [{"text/markdown": "| size | ms |\n|---|---|\n| small | 3.5 |"}, {"image/svg+xml": SVG}]
    words = "# A notebook\n\n$\\frac{x}{\\sqrt{n}}$, [a guide](../papermill_jobs/README.md), [a file](no.txt)."
    cell = nbformat.v4.new_code_cell("show()", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("display_data", data) for data in outputs]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(words), cell])
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, folder / "01_build.ipynb")
    made = folder / "runs" / "pages"
    made.mkdir(parents=True)
    (made / "old.html").touch()
    build = [sys.executable, str(ROOT / "docs" / "build_pages.py"), str(folder), str(made), "--fail-on-warning"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Pages: {made / 'index.html'}\n"
    return made


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_an_executed_notebook_is_shown_with_formulas_tables_and_figures(pages):
    shown = text_of(pages / "notebooks" / "01_build.html")
    assert "<mfrac><mi>x</mi><msqrt><mi>n</mi></msqrt></mfrac>" in shown
    assert re.search(r"<td[^>]*><p>small</p></td>", shown)
    assert re.search(r'<img [^>]*src="\.\./_images/\w+\.svg"', shown)
    assert 'href="../papermill_jobs/README.html"' in shown
    assert "no.txt" not in shown  # a link to what is not there is text
    assert "a file" in shown
    assert not (pages / "old.html").exists()


def test_pages_need_no_network_and_their_links_lead_somewhere(pages):
    for page in pages.rglob("*.html"):
        shown = text_of(page)
        assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(?:https?:)?//[^"]*"', shown)
        targets = {unquote(link) for link in re.findall(r' (?:href|src)="([^"#?:]+)(?=["#?])', shown)}
        assert [link for link in targets if not (page.parent / link).exists()] == [], page
        assert page.stat().st_size <= 1_000_000


def test_the_library_is_documented_in_words(pages):
    linear = text_of(pages / "api" / "lmcore.model.html")
    assert "<title>lmcore.model: The Transformer language model from scratch, from Linear to TransformerLM" in linear
    assert "Float[Tensor, '... d_in']" in re.sub("<[^>]*>", "", linear)
    for name in ("start", "table", "answer"):
        assert f'id="workbook.report.notebook.{name}"' in text_of(pages / "notebook_functions.html")


def test_a_page_that_cannot_be_made_leaves_the_earlier_ones(pages, tmp_path):
    (tmp_path / "broken.ipynb").write_text("{", encoding="utf-8")
    before = (pages / "index.html").stat().st_mtime_ns
    build = [sys.executable, str(ROOT / "docs" / "build_pages.py"), str(tmp_path), str(pages)]
    done = subprocess.run([*build, "-D", "include_patterns=index.md,notebooks/*"], capture_output=True, check=False)
    assert done.returncode != 0
    assert (pages / "index.html").stat().st_mtime_ns == before
