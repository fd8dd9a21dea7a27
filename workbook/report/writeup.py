"""The writeup: the executed notebooks as one PDF, by pandoc and Typst from wheels."""

import json
import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, read_json, temporary_folder
from lmcore.formatting import format_seconds
from workbook.notebook import read_notebook
from workbook.record import NotebookRecord, read_records, unfinished
from workbook.report.coverage import (
    DONE,
    OPEN,
    PARTLY,
    Answered,
    counts_markdown,
    coverage,
    partly_markdown,
    plain_name,
)
from workbook.report.document import NotebookDocument, free_columns, read_document, short
from workbook.report.pandoc import Node, attributes_of, escaped, parse, run_pandoc, text_of, transform

PDF_NAME = "answers.pdf"

RENAMED_SYMBOLS = re.compile(r"\b(dot|times|minus|dash)\.circle\b")
"""Math symbols by the names that pandoc 3.9 writes and Typst 0.14 changed; `sect` is in the template."""

MARKS = {DONE: "✓", PARTLY: "◐", OPEN: "–"}
"""States of a problem in the table of coverage."""

BOXES = ("answer", "failure", "provenance", "contents", "problems")
"""Classes of divs that are functions of the template."""


def write_writeup(out: str | Path) -> Path:
    """Renders the executed workbook in `out` into out/writeup/answers.pdf; returns its path.

    Notebooks that failed or were stopped are shown as far as they came, and that is told at the top. Raises `UserError`
    where no workbook was executed.
    """
    out = Path(out)
    records = read_records(out)
    with temporary_folder("lmcore-writeup-") as folder:
        build = Path(folder)
        documents = read_documents(out, records, build)
        blocks = parse(front_matter(out, records, documents)) + [each for it in documents for each in it.blocks]
        pdf = typeset(blocks, build)
    file = out / "writeup" / PDF_NAME
    with atomic_write(file) as opened:
        opened.write(pdf)
    return file


def read_documents(out: Path, records: list[NotebookRecord], build: Path) -> list[NotebookDocument]:
    """The documents of all notebooks that were started. Raises `UserError` if one that is done is missing."""
    folder = out / "notebooks"
    documents = []
    for record in records:
        file = folder / f"{record.name}.ipynb"
        if record.state == "done" or (record.state != "not run" and file.exists()):  # or stopped before its first cell
            documents.append(read_document(record.name, read_notebook(file), folder, build))
    require(bool(documents), f"No notebook was executed in {out}; run `workbook run` first.")
    return documents


def front_matter(out: Path, records: list[NotebookRecord], documents: list[NotebookDocument]) -> str:
    """What comes before the notebooks, as Markdown: provenance, failures, contents, and where each problem is."""
    rows = "\\\n".join(f"**{name}** {escaped(value)}" for name, value in provenance(out, records).items())
    parts = [f"::: provenance\n{rows}\n:::"]
    parts += [f"::: failure\n{escaped(words)}\n:::" for words in unfinished(records)]
    parts += ["::: contents\n:::"]
    if answers := [answered for document in documents for answered in document.answers]:
        problems = coverage(answers)
        tables = [counts_markdown(problems), partly_markdown(problems), answers_markdown(answers)]
        parts += ["::: problems", *tables, ":::"]
    return "\n\n".join(parts)


def provenance(out: Path, records: list[NotebookRecord]) -> dict[str, str]:
    """What was measured on what, from which code, and what was executed when. Each value is named once.

    Measured is what the tables in out/results say, which may be records of another machine.
    """
    started = [record for record in records if record.state != "not run"]
    executed = [record.environment or {} for record in started]
    tables = [read_json(file).get("provenance") or {} for file in sorted((out / "results").glob("*.json"))]
    measured = [each for each in tables if each.get("device")] or executed
    sources = [source for each in tables for source in _listed(each.get("data")) if source.get("request")]
    first = min((each.get("time_utc") or "" for each in executed), default="")
    duration = format_seconds(sum(record.seconds for record in started))
    return {
        "Scale": str(records[0].scale),
        "Data": _once(each["request"]["source"]["name"] for each in sources) or Path(str(records[0].data)).name,
        "Measured on": _once(device for each in measured for device in _listed(each.get("device"))),
        "Code": _once(map(_commits, measured)),
        "Libraries": _once(library for each in measured for library in _libraries(each)),
        "Executed": f"{first}, {duration}, at {_once(map(_commits, executed))} "
        f"on {_once(each.get('device', 'unknown') for each in executed)}",
    }


def _once(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def _listed(value: Any) -> list:
    """What provenance has where runs differ is a list, else the one value."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _commits(environment: dict[str, Any]) -> str:
    """Commits of the runs behind a table, or of one execution, and whether there were changes besides."""
    known = [commit[:12] for commit in _listed(environment.get("git_commit")) if commit]
    changes = " with uncommitted changes" if any(_listed(environment.get("git_dirty"))) else ""
    return " and ".join(sorted(known)) + changes if known else "not from a git checkout"


def _libraries(environment: dict[str, Any]) -> list[str]:
    versions = {"python": environment.get("python")} | (environment.get("packages") or {})
    return [f"{name} {version}" for name, version in versions.items() if version]


def answers_markdown(answers: list[Answered]) -> str:
    """A table of the problems: their places in the handouts with their states, and links to their answers."""
    places: dict[str, list[str]] = {}
    names, links = {plain_name(each.problem): each.problem for each in answers}, {}
    for problem in coverage(answers):
        names[plain_name(problem.name)] = problem.name
        place = f"{MARKS[problem.state]} {problem.handout}, {problem.place}"
        places.setdefault(plain_name(problem.name), []).append(place)
    for each in answers:
        words = f"{short(each.notebook)} ({each.part})" if each.part else short(each.notebook)
        links.setdefault(plain_name(each.problem), []).append(f"[{words}](#{each.identifier})")
    rows = [
        f"| {escaped(names[key]).replace('&#95;', '&#95;&#8203;')} | {'; '.join(places.get(key, []))} "
        f"| {', '.join(links.get(key, []))} |"
        for key in dict.fromkeys([*places, *names])
    ]
    return "\n".join(["| problem | in the handouts | answers: notebook (part) |", "|---|---|---|", *rows])


def without_broken_links(blocks: list[Node]) -> list[Node]:
    """Links to places that are not in the writeup become their text: Typst would refuse them."""
    targets: set[str] = set()

    def collect(node: Node) -> Node:
        targets.add(f"#{attributes_of(node)[0]}")
        return node

    def repair(node: Node) -> Node | list[Node]:
        is_local = node["t"] == "Link" and not re.match(r"\w+:", node["c"][2][0])
        return node["c"][1] if is_local and node["c"][2][0] not in targets else node

    return transform(transform(blocks, collect), repair)


def typeset(blocks: list[Node], build: Path) -> bytes:
    """The PDF by Typst, from the fonts in its wheel and in matplotlib's alone."""
    import typst

    tree = {"pandoc-api-version": [1, 23, 1], "meta": {}, "blocks": transform(without_broken_links(blocks), _for_typst)}
    body = RENAMED_SYMBOLS.sub(r"\1.o", run_pandoc("json", "typst", json.dumps(tree)))
    template = resources.files("workbook.report").joinpath("writeup.typ").read_text(encoding="utf-8")
    file = build / "writeup.typ"
    file.write_text(template + body, encoding="utf-8")
    try:
        return typst.compile(str(file), root=str(build), font_paths=[str(font_folder())], ignore_system_fonts=True)
    except typst.TypstError as error:
        place = re.search(r"│ (.{0,160})", error.diagnostic)
        where = f" at: {place[1].strip()}" if place else ""
        raise UserError(f"Typst could not typeset the PDF: {error.message}{where}.") from error


def _for_typst(node: Node) -> Node | list[Node]:
    """Boxes as the template's functions, heads of tables bold, characters that no font has spelled out."""
    kind = node["t"]
    if kind == "Div" and (boxes := [name for name in BOXES if name in attributes_of(node)[1]]):
        title = dict(attributes_of(node)[2]).get("title")
        return _around(node, f"#{boxes[0]}-box({json.dumps(title) if title else ''})[", "]")
    if kind == "Para" and (text_of(node["c"]).endswith(":") or _is_question(node)):
        return _around(node, "#block(sticky: true)[", "]")  # it stays with what follows
    if kind == "Table":
        free_columns(node)
        for row in node["c"][3][1]:
            for cell in row[1]:
                cell[4] = transform(cell[4], _bold)
    if kind == "Str":
        node["c"] = spell_out(node["c"])
    if kind in ("Code", "CodeBlock"):
        node["c"][1] = spell_out(node["c"][1])
    return node


def _around(node: Node, before: str, after: str) -> list[Node]:
    """A node between two pieces of Typst."""
    return [{"t": "RawBlock", "c": ["typst", before]}, node, {"t": "RawBlock", "c": ["typst", after]}]


def _is_question(node: Node) -> bool:
    """Whether a paragraph states a problem: it begins with that word in bold."""
    first = node["c"][0] if node["c"] else {}
    return first.get("t") == "Strong" and text_of(first["c"]).startswith(("Problem", "Exercise"))


def _bold(node: Node) -> Node:
    """Text of a table's head in bold: Typst has no style for it."""
    if node["t"] in ("Plain", "Para"):
        node["c"] = [{"t": "Strong", "c": node["c"]}] if node["c"] else []
    return node


def font_folder() -> Path:
    """matplotlib's fonts: DejaVu Sans has the symbols that Typst's own text font lacks."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def known_characters() -> frozenset[int]:
    """Code points that the PDF's fonts can draw."""
    from fontTools.ttLib import TTFont

    known: set[int] = set()
    for name in ("DejaVuSans", "DejaVuSansMono", "STIXGeneral"):
        with TTFont(font_folder() / f"{name}.ttf") as font:
            known |= set(font.getBestCmap())
    return frozenset(known)


def spell_out(text: str) -> str:
    """Characters that no font of the PDF has as ⟨U+4E16⟩; invisible joiners and selectors are dropped."""
    if text.isascii():
        return text
    known = known_characters()
    return "".join(
        c if ord(c) in known or c == "\n" else "" if unicodedata.category(c) in ("Cf", "Mn") else f"⟨U+{ord(c):04X}⟩"
        for c in text
    )
