"""Checks pages that are there: `python docs/check_pages.py PAGES` names what they lack, and fails if it is anything.

Everything that a page shows and links to is there, nothing comes from the network, formulas, tables and shapes are
drawn, and no page is too large for a browser.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LARGEST = 1_000_000
"""Bytes of a page without its pictures."""

REQUIRED = {
    "notebooks/01_build.html": ("<math", "<table"),
    "api/lmcore.model.html": ("Linear", "d_in"),
    "notebook_functions.html": ('id="workbook.report.notebook.answer"', 'id="workbook.report.notebook.start"'),
    "README.html": ("guides/own_gpu.html", "notebooks/01_build.html"),
    "guides/symptoms.html": ("own_gpu.html#one-model",),
    "search.html": ("searchindex.js",),
}
"""What pages hold if they were made as they should be."""


def faults(folder: Path) -> Iterator[str]:
    """A sentence for each thing that is wrong."""
    for name, parts in REQUIRED.items():
        text = (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else ""
        yield from (f"{name} lacks {part!r}." for part in parts if part not in text)
    for page in sorted(folder.rglob("*.html")):
        name, text = page.relative_to(folder), page.read_text(encoding="utf-8")
        size = len(re.sub(r'"data:[^"]*"', "", text))
        if size > LARGEST:
            yield f"{name} has {size:,} bytes."
        for address in re.findall(r'<(?:script|link|img) [^>]*(?:src|href)="((?:https?:)?//[^"]*)"', text):
            yield f"{name} needs {address}."
        for target in sorted(set(re.findall(r' (?:href|src)="([^"#?:]+)(?=["#?])', text))):
            if not (page.parent / target).exists():
                yield f"{name} leads to {target}, which is not there."
        if re.search(r'<a [^>]*><span class="xref', text):
            yield f"{name} has a link without a target."


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path(sys.argv[1]))) or 0)
