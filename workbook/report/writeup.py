"""The writeup: executed notebooks as one self-contained HTML page and one PDF, by pandoc and Typst from wheels."""

import base64
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, read_json, temporary_folder
from lmcore.formatting import format_seconds
from workbook.notebook import read_notebook
from workbook.record import read_record, sentence
from workbook.report import pandoc
from workbook.report.coverage import (
    DONE,
    OPEN,
    PARTLY,
    Answered,
    counts,
    counts_markdown,
    coverage,
    partly_markdown,
    plain_name,
)
from workbook.report.document import NotebookDocument, read_document, short
from workbook.report.pandoc import Node, div, header, inlines, link, para, run_pandoc, strong, table, transform

TITLE = "Building, training and measuring a Transformer language model"
HTML_NAME, PDF_NAME = "answers.html", "answers.pdf"
CODE_COLUMNS, APPENDIX_COLUMNS = 94, 120
"""Characters of a line of preformatted text on the PDF's page, and of code in its appendix."""

RENAMED_SYMBOLS = re.compile(r"\b(dot|times|minus|dash)\.circle\b")
"""Math symbols by the names that pandoc 3.9 writes and Typst 0.14 changed; `sect` is in the template."""

LONG_TABLE = 30
"""Rows from which on a table stands in the PDF's appendix."""

MARKS = {DONE: "✓", PARTLY: "◐", OPEN: "–"}
"""States of a problem in the table of coverage."""

VMATRIX = re.compile(r"\\begin\{vmatrix\}(.*?)\\end\{vmatrix\}", re.DOTALL)

MIME = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg"}


def write_writeup(out: str | Path) -> tuple[Path, Path]:
    """Renders the executed workbook in `out` into out/writeup/answers.html and answers.pdf; returns their paths.

    Notebooks that failed or were stopped are shown as far as they came, and that is told at the top. Raises `UserError`
    where no workbook was executed.
    """
    out = Path(out)
    record = {**read_record(out), "measured": measured_on(out)}
    folder = out / "writeup"
    with temporary_folder("lmcore-writeup-") as temporary:
        build = Path(temporary)
        documents = read_documents(out, record, build)
        tree = assemble(record, documents)
        with atomic_write(folder / HTML_NAME, "w") as file:
            file.write(to_html(tree, build))
        pdf = to_pdf(tree, build)
        with atomic_write(folder / PDF_NAME) as file:
            file.write(pdf)
    return folder / HTML_NAME, folder / PDF_NAME


def read_documents(out: Path, record: dict[str, Any], build: Path) -> list[NotebookDocument]:
    """The documents of all notebooks that were started. Raises `UserError` if one that is done is missing."""
    folder = out / "notebooks"
    documents = []
    for entry in record["notebooks"]:
        name, state = entry["name"], entry["state"]
        file = folder / f"{name}.ipynb"
        if state == "done" or (state != "not run" and file.exists()):  # or stopped before its first cell
            ended = state in ("done", "failed")
            documents.append(read_document(name, read_notebook(file), folder, build / "figures", show_fault=ended))
    require(bool(documents), f"No notebook was executed in {out}; run `workbook run` first.")
    return documents


def assemble(record: dict[str, Any], documents: list[NotebookDocument]) -> Node:
    """One pandoc document: provenance, failures and the list of answers as metadata, the notebooks as the body."""
    blocks = _drop_broken_links([block for document in documents for block in document.blocks])
    answers = [answered for document in documents for answered in document.answers]
    meta = {
        "title": {"t": "MetaInlines", "c": inlines(TITLE)},
        "provenance": {"t": "MetaBlocks", "c": [provenance_table(record)]},
    }
    if failures := failure_notices(record):
        meta["failures"] = {"t": "MetaBlocks", "c": failures}
    if answers:
        problems = coverage(answers)
        tables = f"{counts_markdown(problems)}\n\n{partly_markdown(problems)}"
        meta["counts"] = {"t": "MetaBlocks", "c": pandoc.parse([tables])[0]}
        meta["answers"] = {"t": "MetaBlocks", "c": [answers_table(answers)]}
        blocks += claims_section(answers)
    return {"pandoc-api-version": [1, 23, 1], "meta": meta, "blocks": blocks}


def provenance_table(record: dict[str, Any]) -> Node:
    """What ran, on what, from which code, and when. Notebooks may differ in that: then each value is named once."""
    started = [entry for entry in record["notebooks"] if entry["state"] != "not run"]
    environments = [entry.get("environment") or {} for entry in started]
    duration = format_seconds(sum(entry["seconds"] for entry in started))
    notebooks = "1 notebook" if len(started) == 1 else f"{len(started)} notebooks"
    first = min((environment.get("time_utc") or "" for environment in environments), default="")
    rows = {"Scale": record["scale"]}
    if measured := record.get("measured"):
        rows |= {**measured, "Rendered": f"{first} at {_each(environments, _commit)} on {_each(environments, _device)}"}
    else:
        rows |= {
            "Data": Path(record["data"]).name,
            "Measured on": _each(environments, _device),
            "Code": _each(environments, _commit),
            "Libraries": _libraries(environments),
            "Executed": f"{first}, {duration} for {notebooks}",
        }
    return table([[[strong(name)], inlines(str(text))] for name, text in rows.items()])


def measured_on(out: Path) -> dict[str, str]:
    """Data, devices, commits and libraries of the tables that notebooks read from records; empty if none did."""
    folders = {
        (values.get("parameters") or {}).get("records") for values in map(read_json, (out / "notebooks").glob("*.json"))
    } - {None, ""}
    names = {file.name for folder in folders for file in Path(folder).glob("*.json")}
    read = [read_json(file) for file in sorted((out / "results").glob("*.json")) if file.name in names]
    found = [each for content in read if (each := content.get("provenance") or {}).get("device")]
    if not found:
        return {}
    commits = Counter(map(_commit, found)).most_common()
    devices = [name for each in found for name in _listed(each["device"])]
    data = {}
    for each in (each for each in found if "data" in each):  # older records name the first corpus alone
        data |= zip(_listed(each["data_fingerprint"]), _listed(each["data"]), strict=False)
    rows = {
        "Data": "; ".join(
            f"{each['request']['source']['name']}, {each['train_tokens']:,} training tokens" for each in data.values()
        ),
        "Measured on": "; ".join(dict.fromkeys(devices)),
        "Code": "; ".join(f"{commit} ({count} table{'s' * (count > 1)})" for commit, count in commits),
        "Libraries": _libraries(found),
    }
    return {name: text for name, text in rows.items() if text}


def _listed(value: Any) -> list:
    """What provenance has where runs differ is a list, else the one value."""
    return value if isinstance(value, list) else [value]


def _each(environments: list[dict[str, Any]], describe: Callable[[dict[str, Any]], str]) -> str:
    """The values of all notebooks, in order, each named once."""
    return "; ".join(dict.fromkeys(describe(environment) for environment in environments))


def _device(environment: dict[str, Any]) -> str:
    driver = f", driver {environment['driver']}" if environment.get("driver") else ""
    return f"{environment.get('device', 'unknown')}{driver}"


def _commit(environment: dict[str, Any]) -> str:
    """Commits of the runs behind a table, or of one execution, and whether there were changes besides."""
    commits, dirty = (_listed(environment.get(name)) for name in ("git_commit", "git_dirty"))
    changes = f", {'some ' * (len(dirty) > 1)}with uncommitted changes" if any(dirty) else ""
    known = " and ".join(sorted(commit[:12] for commit in commits)) if all(commits) else ""
    return known + changes if known else "not from a git checkout"


def _libraries(environments: list[dict[str, Any]]) -> str:
    """Names with all versions that took part."""
    versions: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, version in ({"python": environment.get("python")} | (environment.get("packages") or {})).items():
            if version:
                versions.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())


def failure_notices(record: dict[str, Any]) -> list[Node]:
    """A box for each notebook that failed, was stopped or still runs, and one for those that were not run."""
    told = [words for e in record["notebooks"] if e["state"] != "not run" and (words := sentence(e))]
    if waiting := [entry["name"] for entry in record["notebooks"] if entry["state"] == "not run"]:
        told.append(f"Not run: {', '.join(waiting)}.")
    return [div([para(*inlines(words))], "", "failure") for words in told]


def answers_table(answers: list[Answered]) -> Node:
    """Each problem of the handouts with its place in them, whether it is done, and links to its answers."""
    problems = coverage(answers)
    handouts = [handout for handout, states in counts(problems).items() if states["problems"] > 1]
    links: dict[str, list[Node]] = {}
    for answered in answers:
        words = f"{short(answered.notebook)} ({answered.part})" if answered.part else short(answered.notebook)
        links.setdefault(plain_name(answered.problem), []).extend(
            [link(words, f"#{answered.identifier}"), {"t": "Str", "c": ","}, {"t": "Space"}]
        )
    names = {plain_name(each.problem): each.problem for each in answers}
    names |= {plain_name(each.name): each.name for each in reversed(problems)}
    alone = [problem for problem in problems if problem.handout not in handouts]  # which have no column
    names |= {plain_name(each.name): f"{each.name} {MARKS[each.state]}" for each in alone}
    order = dict.fromkeys([plain_name(p.name) for p in problems] + [plain_name(a.problem) for a in answers])
    places = {(plain_name(p.name), p.handout): f"{MARKS[p.state]} {p.place}" for p in problems}
    rows = [
        [
            inlines(names[name].replace("_", "_\u200b")),
            *(inlines(places.get((name, handout), "")) for handout in handouts),
            links.get(name, [])[:-2],
        ]
        for name in order
    ]
    return table(rows, ("Problem", *handouts, "Answer: notebook (part)"))


def claims_section(answers: list[Answered]) -> list[Node]:
    """A section on the claims that do not hold on this machine, each with a link to its answer."""
    failed = [(answered, claim) for answered in answers for claim, holds in answered.claims.items() if not holds]
    count = sum(len(answered.claims) for answered in answers)
    words = "All hold." if not failed else f"{len(failed)} of them do not hold on this machine:"
    blocks = [para(*inlines(f"The answers rest on {count} claims, computed from the tables. {words}"))]
    rows = [[[link(label(each), f"#{each.identifier}")], inlines(claim)] for each, claim in failed]
    listed = [table(rows, ("Answer", "Claim that does not hold"))] if failed else []
    return [header(1, "appendix", "Appendix"), header(2, "claims", "Claims"), *blocks, *listed]


def label(answered: Answered) -> str:
    """An answer's problem and part."""
    return f"{answered.problem} ({answered.part})" if answered.part else answered.problem


def _drop_broken_links(blocks: list[Node]) -> list[Node]:
    """Links to places that are not in the writeup become their text: Typst would refuse them."""
    targets: set[str] = set()

    def collect(node: Node) -> Node:
        attributes = node["c"][1] if node["t"] == "Header" else (node.get("c") or [None])[0]
        if node["t"] in ("Header", "Div", "Span") and attributes[0]:
            targets.add(f"#{attributes[0]}")
        return node

    def mend(node: Node) -> Node | list[Node]:
        target = node["c"][2][0] if node["t"] == "Link" else ""
        is_local = "://" not in target and not target.startswith("mailto:")
        return node["c"][1] if node["t"] == "Link" and is_local and target not in targets else node

    transform(blocks, collect)
    return transform(blocks, mend)


def to_html(tree: Node, build: Path) -> str:
    """The self-contained page: pictures as data addresses, math as MathML, our own stylesheet."""

    def embed(node: Node) -> Node:
        if node["t"] == "Image":
            file = build / node["c"][2][0]
            content = base64.b64encode(file.read_bytes()).decode()
            node["c"][2][0] = f"data:{MIME[file.suffix]};base64,{content}"
        if node["t"] == "Div" and "code" in node["c"][0][1]:
            summary = f'<details class="code" id="{node["c"][0][0]}"><summary>Code</summary>'
            return [
                {"t": "RawBlock", "c": ["html", summary]},
                *node["c"][1],
                {"t": "RawBlock", "c": ["html", "</details>"]},
            ]
        return node

    tree = {**tree, "meta": transform(tree["meta"], embed), "blocks": transform(tree["blocks"], embed)}
    package = resources.files("workbook.report")
    (build / "style.css").write_text(package.joinpath("writeup.css").read_text(encoding="utf-8"), encoding="utf-8")
    (build / "template.html").write_text(package.joinpath("writeup.html").read_text(encoding="utf-8"), encoding="utf-8")
    options = ["-s", "--mathml", "--toc", "--toc-depth=2", "--wrap=none", "--template=template.html"]
    html, _ = run_pandoc(["-f", "json", "-t", "html5", *options], json.dumps(tree), build)
    return html.replace("/* STYLE */", (build / "style.css").read_text(encoding="utf-8"))


def to_pdf(tree: Node, build: Path) -> bytes:
    """The PDF by Typst, from the fonts in its wheel and in matplotlib's alone."""
    import typst

    blocks = with_appendix(tree["blocks"])
    tree = {**tree, "meta": transform(tree["meta"], _for_typst), "blocks": transform(blocks, _for_typst)}
    template = resources.files("workbook.report").joinpath("writeup.typ").read_text(encoding="utf-8")
    (build / "template.typ").write_text(template, encoding="utf-8")
    options = ["-s", "--wrap=none", "--template=template.typ"]
    source, _ = run_pandoc(["-f", "json", "-t", "typst", *options], json.dumps(tree), build)
    source = RENAMED_SYMBOLS.sub(r"\1.o", source)
    (build / "writeup.typ").write_text(source, encoding="utf-8")
    try:
        return typst.compile(
            str(build / "writeup.typ"), root=str(build), font_paths=[str(font_folder())], ignore_system_fonts=True
        )
    except typst.TypstError as error:
        place = re.search(r"│ (.{0,160})", error.diagnostic)
        where = f" at: {place[1].strip()}" if place else ""
        raise UserError(f"Typst could not typeset the PDF: {error.message}{where}.") from error


def with_appendix(blocks: list[Node]) -> list[Node]:
    """Code and long tables at the end, and where they stood a line that says on which page they are."""
    moved: dict[str, list[Node]] = {"Long tables": [], "Code": []}
    body: list[Node] = []
    waiting: list[str] = []  # references to code that follow each other share a line
    section = ""

    def move(title: str, words: str, identifier: str, content: list[Node]) -> str:
        moved[title].append(div([header(4, "", words), *content], identifier))  # a heading stays with what follows
        return f"link(<{identifier}>)[{words.partition(':')[0]}, page #page-of(<{identifier}>)]"

    def moved_table(node: Node) -> Node:
        if node["t"] != "Table" or sum(len(part[3]) for part in node["c"][4]) <= LONG_TABLE:
            return node
        number = len(moved["Long tables"]) + 1
        return _reference([move("Long tables", f"Table A.{number}: {section}", f"long-table-{number}", [node])])

    for block in blocks:
        section = pandoc.text_of(block) if block["t"] == "Header" else section
        if block["t"] == "Div" and "code" in block["c"][0][1]:
            name, _, number = (identifier := block["c"][0][0]).partition("-code-")
            lines = [{"t": "CodeBlock", "c": [["", ["python"], []], node["c"][1]]} for node in block["c"][1]]
            waiting.append(move("Code", f"Code {short(name)}.{number}", identifier, lines))
            continue
        body += [_reference(waiting)] if waiting else []
        waiting = []
        body.append(transform(block, moved_table))
    body += [_reference(waiting)] if waiting else []
    for title, found in moved.items():
        body += [header(2, f"appendix-{title[:4].lower()}", title), *found] if found else []
    return body


def _reference(links: list[str]) -> Node:
    """A line that says where the appendix has something."""
    return {"t": "RawBlock", "c": ["typst", f"#appendix-link[#{' · #'.join(links)}]"]}


def _for_typst(node: Node) -> Node | list[Node]:
    """Boxes as the template's functions, long lines broken, characters that no font has spelled out."""
    if node["t"] == "Div":
        classes = [name for name in ("answer", "failure", "figure") if name in node["c"][0][1]]
        if classes:
            opening = {"t": "RawBlock", "c": ["typst", f"#{classes[0]}-box["]}
            return [opening, node, {"t": "RawBlock", "c": ["typst", "]"]}]
    if node["t"] == "Para" and (pandoc.text_of(node["c"]).endswith(":") or _is_question(node)):
        before, after = ({"t": "RawBlock", "c": ["typst", part]} for part in ("#block(sticky: true)[", "]"))
        return [before, node, after]  # it stays with what follows
    if node["t"] == "Table":
        for row in node["c"][3][1]:
            for cell in row[1]:
                cell[4] = transform(cell[4], _bold)
    if node["t"] == "Str":
        node["c"] = spell_out(node["c"])
    if node["t"] == "Math":  # Typst's matrix takes single characters as delimiters, but pandoc gives it "||"
        node["c"][1] = VMATRIX.sub(r"\\left|\\begin{matrix}\1\\end{matrix}\\right|", node["c"][1])
    if node["t"] in ("Code", "CodeBlock"):
        node["c"][1] = spell_out(node["c"][1])
    if node["t"] == "CodeBlock":
        node["c"][1] = break_lines(node["c"][1], CODE_COLUMNS if not node["c"][0][1] else APPENDIX_COLUMNS)
    return node


def _is_question(node: Node) -> bool:
    """Whether a paragraph states a problem: it begins with that word in bold."""
    first = node["c"][0] if node["c"] else {}
    return first.get("t") == "Strong" and pandoc.text_of(first["c"]).startswith(("Problem", "Exercise"))


def _bold(node: Node) -> Node:
    """Text of a table's head in bold: Typst has no style for it."""
    if node["t"] in ("Plain", "Para"):
        node["c"] = [{"t": "Strong", "c": node["c"]}] if node["c"] else []
    return node


def break_lines(text: str, columns: int = CODE_COLUMNS) -> str:
    """Lines longer than the page is wide go on in the next line, after a space if there is one near the end."""
    lines = []
    for line in text.split("\n"):
        while len(line) > columns:
            end = line.rfind(" ", columns * 2 // 3, columns) + 1 or columns
            lines.append(line[:end])
            line = line[end:]
        lines.append(line)
    return "\n".join(lines)


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
