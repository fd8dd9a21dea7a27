"""The book as pages, by Sphinx and myst-nb: build_pages.py puts executed notebooks and the project's pages here."""

import html
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pypandoc
from docutils import nodes

import lmcore

project = "lmcore"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "lmcore"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_copy_source = False
html_math_renderer = "mathml"  # which browsers draw without a script from the network
smartquotes = False

include_patterns = [
    *("index.md", "writeup.md", "guides/*", "notebook_functions.rst", "notebooks/*", "api/*"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/coverage.md", "docs/teaching.md"),
    *("papermill_jobs/README.md", "benchmarks/*.md", "results/**.md"),
]
nb_execution_mode = "off"  # they are executed
nb_ipywidgets_js = {}  # bars of progress are no part of a page
nb_merge_streams = True
nb_render_markdown_format = "myst"  # with tables and formulas
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"  # docstrings are written as Markdown
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "undoc-members": True}
toc_object_entries_show_parents = "hide"
viewcode_follow_imported_members = False

# `without_dead_links` looks after links to what is no page; annotations do not mean fields that are named as types.
suppress_warnings = ["myst.xref_missing", "myst.header", "myst-nb.mime_priority", "ref.python"]

WITHOUT_PAGES = ("cli", "__main__", "gpu", "hopper")
"""Names of modules with commands, which have --help, and with device code, which has no docstrings."""


def write_module_pages(folder: Path) -> None:
    """A page for each module of lmcore: its docstring, its members, and the modules below it."""
    folder.mkdir()
    for name in sorted(["lmcore", *modules_below(lmcore)]):
        module = importlib.import_module(name)
        title = " ".join([f"{name}:", summary(module)])
        below = [each for each in modules_below(module) if each.count(".") == name.count(".") + 1]
        lines = [title, "=" * len(title), "", f".. automodule:: {name}", "   :ignore-module-all:", ""]
        lines += [*(f"* :doc:`{each}`" for each in below), ""]
        lines += [".. toctree::", "   :hidden:", "", *(f"   {each} <{each}>" for each in below), ""] if below else []
        (folder / f"{name}.rst").write_text("\n".join(lines), encoding="utf-8")


def modules_below(package: ModuleType) -> list[str]:
    """Full names of all modules in a package that have a page."""
    found = pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}.")
    return [each.name for each in found if not set(each.name.split(".")) & set(WITHOUT_PAGES)]


def summary(module: ModuleType) -> str:
    """What a module's docstring begins with, without the rest of the sentence."""
    sentence = (module.__doc__ or "").split("\n")[0].removeprefix("lmcore: ")
    for end in (". ", ": ", "; ", " ("):
        sentence = sentence.partition(end)[0]
    return sentence.rstrip(".:,").replace("`", "")


def without_dead_links(app: Any, tree: Any, page: str) -> None:
    """Leaves the words of a link to a file that has no page."""
    for link in [*tree.findall(nodes.reference)]:
        if any({"xref", "myst"} <= set(child.get("classes", ())) for child in link.findall(nodes.inline)):
            link.replace_self(link.children)


def without_contents(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Leaves the contents list out of pages of source code: it takes a quarter of a second a page."""
    if page.startswith("_modules/"):
        context.pop("toctree", None)


def add_mathml(app: Any, tree: Any, page: str) -> None:
    """Gives all formulas of a page what pandoc makes of them: MathML; one that it does not know stays as it is."""
    formulas = [node for node in tree.findall() if isinstance(node, nodes.math | nodes.math_block)]
    if not formulas:
        return
    marks = ["$$" if isinstance(node, nodes.math_block) else "$" for node in formulas]
    texts = (re.sub(r"\s*\n\s*", " ", node.astext().strip()) for node in formulas)
    source = "\n\n".join(f"{mark}{text}{mark}" for mark, text in zip(marks, texts, strict=True))
    made = pypandoc.convert_text(source, "html", "markdown", ["--mathml", "--wrap=none"])
    paragraphs = re.findall("<p>(.*?)</p>", made, re.DOTALL)
    if len(paragraphs) == len(formulas):
        for node, paragraph in zip(formulas, paragraphs, strict=True):
            node["mathml"] = paragraph


def visit_math(writer: Any, node: Any) -> None:
    """Writes a formula into the page."""
    tag = "div" if isinstance(node, nodes.math_block) else "span"
    written = node.get("mathml") or html.escape(node.astext())
    writer.body.append(f'<{tag} class="math">{written}</{tag}>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("doctree-resolved", add_mathml)
    app.connect("doctree-resolved", without_dead_links)
    app.connect("html-page-context", without_contents, priority=400)
    write_module_pages(Path(app.srcdir) / "api")
