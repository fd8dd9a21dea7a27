"""The writeup: a PDF for each handout, from the answers of the executed notebooks, by pandoc and Typst from wheels."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.errors import UserError, require
from lmcore.files import atomic_write, read_json, temporary_folder
from workbook.notebook import read_notebook
from workbook.record import NotebookRecord, read_records, unfinished
from workbook.report.answers import BLOCK_START, escaped
from workbook.report.contents import NotebookContents, read_contents
from workbook.report.coverage import OPEN, PARTLY, Answered, Problem, coverage
from workbook.seal import notebooks_digest


@dataclass(frozen=True)
class Handout:
    """A document that is handed in: the name of its file, its title, and the most pages it may have."""

    name: str
    title: str
    most_pages: int = 15


HANDOUTS = {
    "CSE599-O A1 part 1": Handout("cse599o-a1-part1", "CSE599-O, assignment 1, part 1: basics"),
    "CSE599-O A1 part 2": Handout("cse599o-a1-part2", "CSE599-O, assignment 1, part 2: training and profiling"),
    "CS336 A1 2026": Handout("cs336-a1", "CS336, assignment 1 (2026): basics"),
    "CS336 A2 2025": Handout("cs336-a2-2025", "CS336, assignment 2 (2025): systems and parallelism", 25),
    "CS336 A2 2026": Handout("cs336-a2-2026", "CS336, assignment 2 (2026): systems and parallelism", 25),
    "WikiText-103 report": Handout("wikitext103-report", "WikiText-103: the optimization report"),
}
"""By the name of the handout in problems.csv."""

REPORT, REPORT_NOTEBOOK = "WikiText-103 report", "10_wikitext"
"""The handout that asks for a report and no answers, and the notebook that is the report."""

MARKDOWN = "commonmark_x+implicit_figures-emoji-fancy_lists-yaml_metadata_block-smart"
"""Markdown as Jupyter reads it (CommonMark, pipe tables, dollar math), plus attributes, footnotes and fenced divs."""

RENAMED_SYMBOLS = re.compile(r"\b(dot|times|minus|dash)\.circle\b")
"""Math symbols by the names that pandoc 3.9 writes and Typst 0.14 changed; `sect` is in the template."""


def write_writeup(out: str | Path) -> list[Path]:
    """Renders the executed workbook in `out` into a PDF for each handout, in out/writeup; returns their paths.

    Notebooks that failed or were stopped are shown as far as they came, and that is told at the top. A handout of which
    nothing is answered has no PDF. Raises `UserError` where no workbook was executed.
    """
    out = Path(out)
    records, made = read_records(out), {}
    with temporary_folder("lmcore-writeup-") as folder:
        notebooks = executed_notebooks(out, records)
        contents = [read_contents(name, notebook, Path(folder)) for name, notebook in notebooks.items()]
        made_from = notebooks_digest([*notebooks.values()])
        for handout, text in documents(out, records, contents).items():
            made[HANDOUTS[handout]] = typeset(HANDOUTS[handout].title, text, made_from, Path(folder))
    for old in (out / "writeup").glob("*.pdf"):
        old.unlink()
    for handout, pdf in made.items():
        with atomic_write(out / "writeup" / f"{handout.name}.pdf") as opened:
            opened.write(pdf)
    return [out / "writeup" / f"{handout.name}.pdf" for handout in made]


def executed_notebooks(out: Path, records: list[NotebookRecord]) -> dict[str, Any]:
    """All notebooks that were started, by name. Raises `UserError` if one that is done is missing."""
    notebooks = {}
    for record in records:
        file = out / "notebooks" / f"{record.name}.ipynb"
        if record.state == "done" or (record.state != "not run" and file.exists()):  # or stopped before its first cell
            notebooks[record.name] = read_notebook(file)
    require(bool(notebooks), f"No notebook was executed in {out}; run `workbook run` first.")
    return notebooks


def documents(out: Path, records: list[NotebookRecord], contents: list[NotebookContents]) -> dict[str, str]:
    """The Markdown of each handout of which something is answered."""
    problems = coverage(answer for each in contents for answer in each.answers)
    written = {}
    for handout in HANDOUTS:
        asked = [problem for problem in problems if problem.handout == handout]
        if any(problem.answers for problem in asked):
            report = next((each for each in contents if each.name == REPORT_NOTEBOOK), None)
            # of a report all text but the first cell, which is for readers of the workbook
            body = report.text[1:] if handout == REPORT and report else answers_text(asked)
            of = {answer.notebook for problem in asked for answer in problem.answers}
            files = [out / file for each in contents if each.name in of for file in each.results]
            tables = [read_json(file) for file in files if file.is_file()]
            written[handout] = "\n\n".join([*front_matter(records, asked, tables), *body])
    return written


def front_matter(records: list[NotebookRecord], problems: list[Problem], tables: list[Any]) -> list[str]:
    """Machine, commits and text used; notebooks that failed; what is answered in part or not, and why."""
    parts = ["\n".join(f"- **{name}:** {escaped(value)}" for name, value in provenance(records, tables).items())]
    parts += [f"**{escaped(words)}**" for words in unfinished(records)]
    partly = [f"- {escaped(each.name)}: {each.missing}." for each in problems if each.state == PARTLY]
    absent = [f"- {escaped(each.name)}" for each in problems if each.state == OPEN]
    parts += ["**Answered in part; what is missing:**", "\n".join(partly)] if partly else []
    parts += ["**Not answered:**", "\n".join(absent)] if absent else []
    return parts


def provenance(records: list[NotebookRecord], tables: list[Any]) -> dict[str, str]:
    """What was measured on what machine, from which commits, and on which text.

    Measured is what the results files `tables` say, which may be records of another machine.
    """
    executed = [record.environment or {} for record in records if record.state != "not run"]
    given = [table.get("provenance") or {} for table in tables]
    asked = [data.get("request") for each in given for data in _listed(each.get("data"))]
    names = [request["source"]["name"] for request in asked if request]
    commits: dict[str, list[str]] = {}
    for each in [each for each in given if each.get("device")] or executed:
        changed = " with uncommitted changes" if any(_listed(each.get("git_dirty"))) else ""
        found = [commit[:8] + changed for commit in _listed(each.get("git_commit")) if commit]
        for device in _listed(each.get("device")):
            commits.setdefault(device, []).extend(found)
    machines = [f"{device} ({', '.join(sorted({*of})) or 'not from a git checkout'})" for device, of in commits.items()]
    return {
        "Measured on (at the commits)": "; ".join(machines),
        "Text": "; ".join(dict.fromkeys(names)) or Path(str(records[0].data)).name,
        "Scale": f"{records[0].scale}, of the workbook's smoke, laptop and gpu",
    }


def _listed(value: Any) -> list:
    """What provenance has where runs differ is a list, else the one value."""
    return value if isinstance(value, list) else [] if value is None else [value]


def answers_text(problems: list[Problem]) -> list[str]:
    """The problems in the handout's order; those whose deliverable is code are the rows of one table."""
    answered = [problem for problem in problems if problem.answers]
    rows = []
    for each in (problem for problem in answered if problem.tests):
        what = in_a_cell(" ".join(answer.text for answer in each.answers))
        rows.append(f"| {breakable(each.name)} ({marks(each)}) | {what} | {breakable(each.tests)} |")
    head = "| problem | what it is | tests |\n|---|---|---|\n"
    parts = ["## Code, with its tests", f"::: code\n{head}" + "\n".join(rows) + "\n:::"] if rows else []
    for problem in (each for each in answered if not each.tests):
        parts += [f"## {escaped(problem.name)} ({marks(problem)})", *answer_text(problem.answers)]
    return parts


def answer_text(answers: list[Answered]) -> list[str]:
    """The answers to the parts of one problem, with at most one table and one figure, and with samples of text."""
    parts = []
    for answer in answers:
        gap = "\n\n" if BLOCK_START.match(answer.text) else " "
        parts.append(f"**({answer.part[:1]})**{gap}{answer.text}" if answer.part[:1].islower() else answer.text)
    tables = [] if any("\n|" in answer.text for answer in answers) else [a.table for a in answers if a.table]
    figures = [answer.figure for answer in answers if answer.figure]
    return [*parts, *tables[-1:], *figures[-1:], *(answer.samples for answer in answers if answer.samples)]


def marks(problem: Problem) -> str:
    """Where a problem stands, and its marks."""
    points = f", {problem.points} point{'s' if problem.points != '1' else ''}" if problem.points else ""
    return f"{problem.place}{points}"


def in_a_cell(text: str) -> str:
    """Markdown for a cell of a table."""
    return re.sub(r"\s*\n\s*", " ", text).replace("|", r"\|")


def breakable(name: str) -> str:
    """A long name as Markdown that may be broken after each underscore."""
    return escaped(name).replace("&#95;", "&#95;&#8203;")


def typeset(title: str, text: str, made_from: str, build: Path) -> bytes:
    """The PDF of a Markdown text by Typst, from the fonts in its wheel and in matplotlib's alone.

    `made_from` is kept among its keywords. Raises `UserError` if Typst cannot set it."""
    import pypandoc
    import typst

    filter, template = (Path(__file__).with_name(name) for name in ("writeup.lua", "writeup.typ"))
    command = [pypandoc.get_pandoc_path(), "-f", MARKDOWN, "-t", "typst", "--wrap=none", f"--lua-filter={filter}"]
    # in a session of its own: Ctrl-C is for the workbook, which ends in order
    done = subprocess.run(
        command, input=text, cwd=build, capture_output=True, encoding="utf-8", check=False,
        start_new_session=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"pandoc failed: {done.stderr.strip()}")
    head = template.read_text(encoding="utf-8").replace("TITLE", title).replace("DIGEST", made_from)
    file = build / template.name
    file.write_text(head + RENAMED_SYMBOLS.sub(r"\1.o", done.stdout), encoding="utf-8")
    try:
        return typst.compile(str(file), root=str(build), font_paths=[str(font_folder())], ignore_system_fonts=True)
    except typst.TypstError as error:
        place = re.search(r"│ (.{0,160})", error.diagnostic)
        where = f" at: {place[1].strip()}" if place else ""
        raise UserError(f"Typst could not typeset the PDF: {error.message}{where}.") from error


def font_folder() -> Path:
    """matplotlib's fonts: DejaVu Sans has the symbols that Typst's own text font lacks."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
