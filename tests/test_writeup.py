"""The writeup from executed notebooks, and answers and their wording."""

import base64
import dataclasses
import json
import re
import shutil
import zlib
from collections import Counter
from pathlib import Path

import nbformat
import numpy as np
import pypdf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_cells import ANSWERS

from lmcore import formatting
from lmcore.errors import UserError
from lmcore.files import read_json
from workbook import publish
from workbook.record import NotebookRecord, read_notebook_record, update_plan, write_notebook_record
from workbook.report import answers, coverage
from workbook.report.document import plain_text, shorten
from workbook.report.notebook import show_source
from workbook.report.verify import check_writeup
from workbook.report.writeup import break_lines, spell_out, write_writeup

ROOT = Path(__file__).parents[1]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="90"><rect width="9" height="9"/></svg>'


def tiny_png() -> bytes:
    """A white picture of 2 by 2 points."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = bytes([0, 0, 0, 2, 0, 0, 0, 2, 8, 0, 0, 0, 0])
    rows = zlib.compress(b"\x00\xff\xff" * 2)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def table(columns: int) -> str:
    """A table as pandas renders it."""
    head = "".join(f"<th>column_{i}</th>" for i in range(columns))
    row = "".join(f"<td>-{i}.123456</td>" for i in range(columns))
    return (
        f"<div><style>td {{}}</style><table><thead><tr>{head}</tr></thead><tbody><tr>{row}</tr></tbody></table></div>"
    )


def display(data: dict, **metadata) -> nbformat.NotebookNode:
    return new_output("display_data", data, metadata=metadata)


def stream(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def cell(*outputs, tags=(), source="hidden_source_code = 1", **metadata) -> nbformat.NotebookNode:
    return new_code_cell(
        source, outputs=list(outputs), execution_count=1, metadata={"tags": ["parameters", *tags], **metadata}
    )


def show(thing) -> nbformat.NotebookNode:
    """The output that IPython makes of an object."""
    from IPython.core.interactiveshell import InteractiveShell

    data, metadata = InteractiveShell.instance().display_formatter.format(thing)
    return new_output("display_data", data, metadata=metadata)


def executed_workbook(folder, state="done", **notebooks):
    """A workbook folder with these notebooks as if they had been executed."""
    (folder / "notebooks").mkdir(parents=True)
    environment = {"python": "3.11", "device": "CPU", "git_commit": "abcdef1234567890", "time_utc": "2026-01-01"}
    names = [name.lstrip("_") for name in notebooks]
    for name, cells in zip(names, notebooks.values(), strict=True):
        made = [new_markdown_cell(c) if isinstance(c, str) else c for c in cells]
        for number, code in enumerate((c for c in made if c.cell_type == "code"), 1):
            code.execution_count = number
        nbformat.write(new_notebook(cells=made), folder / "notebooks" / f"{name}.ipynb")
        record = NotebookRecord(name, state, 1.5, scale="smoke", data="embedded", environment=environment)
        write_notebook_record(folder, record)
    update_plan(folder, "smoke", "embedded", names, names)
    return folder


def change_record(out, name, **fields):
    """Changes the record of a notebook; those of its environment one by one."""
    record = read_notebook_record(out, name)
    fields["environment"] = record.environment | fields.get("environment", {})
    write_notebook_record(out, dataclasses.replace(record, **fields))


FIRST = [
    "# 01 Build\n\nThe sigmoid $\\sigma(x) = \\frac{1}{1 + e^{-x}}$, see [training](02_train.ipynb), "
    "[below](#Wide-Table) and [nowhere](#gone).\n- a list\n\n"
    "$$\\text{softmax}(v)_i = \\frac{e^{v_i}}{\\sum_j e^{v_j}}$$\n\n"
    "\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}\n\n![a remote picture](https://example.org/x.png)",
    cell(
        display({"image/svg+xml": SVG, "text/plain": "<Figure>"}, **{"image/svg+xml": {"caption": "Loss by $\\theta$"}})
    ),
    cell(display({"image/png": base64.b64encode(tiny_png()).decode()}), caption="A caption of the cell"),
    "## Wide Table",
    cell(display({"text/html": table(18), "text/plain": "x"})),
    cell(display({"text/html": table(3), "text/plain": "x"})),
    cell(stream("never shown"), stream("warning!", "stderr")),
    cell(stream("\x1b[31mred\x1b[0m 10%\r99% こ\n" + "w" * 300), tags=["show_stdout"]),
    cell(stream("printed, the same each time"), tags=["keep_output"]),
    cell(display({"text/plain": "[<matplotlib.lines.Line2D at 0x7f0000000000>]"})),
    cell(show(show_source(tiny_png))),
    cell(display({"text/plain": "left out"}), tags=["remove_output"]),
    cell(show(answers.answer("transformer_accounting (a)", "There are **1.64 billion** parameters."))),
    cell(show(answers.answer("transformer_accounting (b)", "| part | share |\n|---|---|\n| the ffn | 60.5 ms |"))),
    cell(show(answers.answer("transformer_accounting (b)", "Again."))),
]
SECOND = ["# 02 Train\n\nBack to [the table](01_build.ipynb#Wide-Table).", cell(show(answers.answer("adamw", "Done.")))]


@pytest.fixture(scope="module")
def writeup(tmp_path_factory):
    out = executed_workbook(tmp_path_factory.mktemp("workbook") / "out", _01_build=FIRST, _02_train=SECOND)
    html, pdf = write_writeup(out)
    return out, html.read_text(encoding="utf-8"), pdf


def pdf_text(pdf) -> str:
    return " ".join(page.extract_text() for page in pypdf.PdfReader(pdf).pages)


def test_check_counts_what_is_there(writeup):
    found = check_writeup(writeup[0])
    assert {key: found[key] for key in ("notebooks", "figures")} == {"notebooks": 2, "figures": 2}


def test_math_is_rendered(writeup):
    _, html, pdf = writeup
    assert html.count("<math") == 4  # two formulas, the environment, and one in a caption
    for text in (re.sub(r"<annotation.*?</annotation>", "", html, flags=re.DOTALL), pdf_text(pdf)):
        assert not re.search(r"\\(frac|sigma|begin|text|sum|theta)", text)


def test_math_that_pandoc_and_typst_spell_differently(tmp_path):
    math = r"$a \odot b \otimes c \ominus d$ "
    math += r"$A \cap B \bigcap \sqcap \bigodot$ $\begin{vmatrix}a & b \\ c & d\end{vmatrix}$"
    out = executed_workbook(tmp_path / "out", _01_build=[f"# 01 Build\n\n{math}"])
    _, pdf = write_writeup(out)
    for symbol in "⊙⊗⊖∩⋂⊓":
        assert symbol in pdf_text(pdf)


def test_unasked_prints_are_hidden(writeup):
    _, html, pdf = writeup
    for text in (html, pdf_text(pdf)):
        for hidden in ("hidden_source_code", "never shown", "warning!", "Line2D", "left out"):
            assert hidden not in text


def test_code_is_folded_in_html_and_in_the_appendix_of_the_pdf(writeup):
    _, html, pdf = writeup
    assert re.search(r'<details class="code" id="01_build-code-\d+-library">.*?IHDR.*?</details>', html, re.DOTALL)
    assert "IHDR" not in re.sub(r"<details class.*?</details>", "", html, flags=re.DOTALL)
    pages = [page.extract_text() for page in pypdf.PdfReader(pdf).pages]
    number, place = next((n, text) for n, text in enumerate(pages, 1) if "IHDR" in text)
    listing = re.search(r"Code 1\.\d+-library", place)[0]
    assert "Appendix" in " ".join(pages[:number])
    assert f"{listing}, page {number}" in " ".join(pages)


def test_printed_text_is_cleaned(writeup):
    _, html, pdf = writeup
    assert "99% こ" in html
    assert "printed, the same each time" in html
    assert "10%" not in html
    assert "[31m" not in html
    assert "U+3053" in pdf_text(pdf)


def test_captions_and_pictures(writeup):
    _, html, pdf = writeup
    assert html.count("<figcaption") == 2
    assert "A caption of the cell" in html
    assert "A caption of the cell" in pdf_text(pdf)
    assert "<em>a remote picture</em>" in html
    assert "example.org" not in html


def test_links_lead_to_places_in_the_page(writeup):
    _, html, _ = writeup
    targets = set(re.findall(r'href="#([^"]*)"', html))
    identifiers = re.findall(r' id="([^"]*)"', html)
    assert targets <= set(identifiers)
    assert len(identifiers) == len(set(identifiers))
    assert {"01_build", "02_train", "01_build-wide-table", "answer-02_train-adamw"} <= targets
    assert "nowhere" in html


def test_answers_are_marked_and_listed(writeup):
    _, html, pdf = writeup
    assert html.count('class="answer"') == 4
    assert "Answer — transformer_accounting (a)." in html
    listed = re.search(r'<section id="problems">.*?</section>', html, re.DOTALL)[0]
    assert "transformer_accounting" in listed
    assert "adamw" in listed
    assert listed.count("href=") == 4
    assert re.search(r"<td>✓ §4.3</td>.{0,200}#answer-02_train-adamw", listed, re.DOTALL)  # its place, and it is done
    assert re.search(r"<td>◐ §3.6</td>.{0,200}#answer-01_build-transformer_accounting-a", listed, re.DOTALL)
    assert re.search(r"transformer_accounting</code></td>\s*<td>[^<]*§3.6[^<]*</td>\s*<td>\(c\) \(d\) \(e\)<", listed)
    assert "1.64 billion" in pdf_text(pdf)


def test_numbers_of_tables_stay_with_their_units(writeup):
    assert re.search(r"<td[^>]*>the ffn</td>\s*<td[^>]*>60.5\u00a0ms</td>", writeup[1])


def test_provenance_heads_the_page(writeup):
    _, html, pdf = writeup
    for text in (html, pdf_text(pdf)):
        for fact in ("smoke", "embedded", "abcdef123456", "CPU"):
            assert fact in text


def test_notebooks_of_several_machines_name_each_once(tmp_path):
    out = executed_workbook(tmp_path / "out", _01_build=FIRST[:1], _02_train=SECOND, _03_generate=SECOND)
    for number, name in enumerate(("01_build", "02_train", "03_generate")):
        commit = "abcdef1234567890" if number < 2 else "0123456789abcdef"
        device, time = ("GPU" if number else "CPU"), f"2026-01-0{3 - number}"
        change_record(out, name, environment={"device": device, "git_commit": commit, "time_utc": time})
    html, _ = write_writeup(out)
    page = html.read_text()
    for row in ("CPU; GPU", "abcdef123456; 0123456789ab", "python 3.11", "2026-01-01, 4.50 s for 3 notebooks"):
        assert f"<td>{row}</td>" in page


def test_rendered_from_records_the_page_names_what_was_measured_where(tmp_path):
    """Not the machine and commit that rendered it: those stand in a row of their own."""
    out = executed_workbook(tmp_path / "out", _01_build=FIRST[:1])
    records, measured = tmp_path / "records", read_json(ROOT / "results" / "h200" / "training_runs.json")
    provenance = measured["provenance"]
    several = ["abcdef0123456789", "fedcba9876543210"]  # commits of a table's runs, some of them with changes
    commits = {"first": several, "second": several[::-1], "third": "0123456789abcdef"}
    devices = {"first": "NVIDIA H200", "second": "NVIDIA H200", "third": ["NVIDIA H200", "NVIDIA H100"]}  # dealt out
    records.mkdir()
    for name, commit in commits.items():
        changes = {"git_commit": commit, "git_dirty": [None, True] if isinstance(commit, list) else None}
        (records / f"{name}.json").write_text(
            json.dumps(measured | {"provenance": provenance | changes | {"device": devices[name]}})
        )
    shutil.copytree(records, out / "results")
    change_record(out, "01_build", parameters={"records": str(records)})
    page = write_writeup(out)[0].read_text()
    rows = {
        "Data": f"stories, {provenance['data']['train_tokens']:,} training tokens",
        "Measured on": "NVIDIA H200; NVIDIA H100</td>",
        "Code": "abcdef012345 and fedcba987654, some with uncommitted changes (2 tables); 0123456789ab (1 table)",
        "Rendered": "at abcdef123456 on CPU",
    }
    for name, text in rows.items():
        assert re.search(rf"<strong>{name}</strong></td>\s*<td>[^<]*{re.escape(text)}", page), name


def test_every_state_has_its_sentence(tmp_path):
    out = executed_workbook(tmp_path / "out", _01_build=FIRST[:1], _02_train=SECOND, _03_generate=SECOND, _04_x=SECOND)
    change_record(out, "02_train", state="stopped", cell=3, error="SIGUSR1")
    change_record(out, "03_generate", state="running")
    change_record(out, "04_x", state="not run")
    (out / "notebooks" / "03_generate.ipynb").unlink()  # it was killed before anything was saved
    html, pdf = write_writeup(out)
    for text in (html.read_text(), re.sub(r"\s+", " ", pdf_text(pdf))):
        told = [
            "Notebook 02_train was stopped by SIGUSR1 at code cell 3.",
            "Notebook 03_generate was stopped before its end.",
            "Not run: 04_x.",
        ]
        assert [text.index(words) for words in told] == sorted(text.index(words) for words in told)
        assert "failed" not in text
    with pytest.raises(UserError, match="02_train is not complete: its state is 'stopped'"):
        check_writeup(out)


def text_sizes(pdf) -> dict[str, float]:
    """Heights of the pieces of text in a PDF, in points."""
    sizes: dict[str, float] = {}

    def visit(text, matrix, position, font, size):
        sizes[text.strip()] = size * abs(position[3]) * abs(matrix[3])

    for page in pypdf.PdfReader(pdf).pages:
        page.extract_text(visitor_text=visit)
    return sizes


def test_wide_tables_are_set_smaller_and_stay_on_the_page(writeup):
    sizes = text_sizes(writeup[2])
    wide = next(size for text, size in sizes.items() if "column_17" in text)
    usual = next(size for text, size in sizes.items() if "billion" in text)
    assert wide < 0.7 * usual


def test_nothing_from_outside(writeup):
    assert not re.search(r'(src|href)="(?!data:|#)', writeup[1])


def change(out, name, replace):
    """A copy of the writeup with one file changed."""
    file = out / "writeup" / name
    file.write_bytes(replace(file.read_bytes()))


@pytest.mark.parametrize(
    ("name", "replace", "words"),
    [
        ("answers.html", lambda b: b.replace(b"<img", b"<imk", 1), "shows 1 of 2 figures"),
        ("answers.html", lambda b: b.replace(b'id="02_train"', b"", 1), "lacks the part '02_train'"),
        ("answers.html", lambda b: b.replace(b'class="answer"', b'class="failure"', 1), "failed cell"),
        ("answers.html", lambda b: b + b'<span class="math inline">\\frac{1}{2}</span>', "raw LaTeX"),
        ("answers.html", lambda b: b + b'<script src="https://cdn/x.js"></script>', "needs https://cdn/x.js"),
        ("answers.pdf", lambda b: b[:1000], "not a sound PDF"),
    ],
)
def test_check_finds_damage(tmp_path, name, replace, words):
    out = executed_workbook(tmp_path / "out", _01_build=FIRST[:3], _02_train=SECOND)
    write_writeup(out)
    check_writeup(out)
    change(out, name, replace)
    with pytest.raises(UserError, match=words):
        check_writeup(out)


def test_check_finds_a_notebook_that_the_pdf_lacks(tmp_path):
    out = executed_workbook(tmp_path / "out", _01_build=FIRST[:3], _02_train=SECOND)
    write_writeup(out)
    notebook = out / "notebooks" / "02_train.ipynb"
    notebook.write_text(notebook.read_text().replace("# 02 Train", "# 02 Another title"))
    with pytest.raises(UserError, match=r"answers\.pdf lacks the notebook '02 Another title'"):
        check_writeup(out)


def test_check_finds_missing_files_and_failures(tmp_path):
    out = executed_workbook(tmp_path / "out", state="failed", _02_train=SECOND)
    with pytest.raises(UserError, match=r"lacks .*answers\.html"):
        check_writeup(out)
    change_record(out, "02_train", cell=1, error="ValueError: no")
    write_writeup(out)
    with pytest.raises(UserError, match="02_train is not complete"):
        check_writeup(out)


def test_no_workbook_there(tmp_path):
    with pytest.raises(UserError, match=r"workbook\.json"):
        write_writeup(tmp_path)


def test_error_is_shown_plainly(tmp_path):
    error = new_output(
        "error", ename="ValueError", evalue="bad luck", traceback=["\x1b[31mValueError\x1b[0m: bad luck"]
    )
    out = executed_workbook(tmp_path / "out", _01_build=["# 01 Build", "## Here", cell(error)])
    html, _ = write_writeup(out)
    text = html.read_text()
    assert 'class="failure"' in text
    assert "failed at code cell 1 under “Here”" in text
    assert "bad luck" in text
    assert "\x1b" not in text


def test_claims_that_fail_are_listed_at_the_end(tmp_path):
    claims = {"it falls": False, "it is there": True}
    cells = ["# 02 Train", cell(show(answers.answer("adamw (b)", "Done.", claims))), "## The last section"]
    html, pdf = write_writeup(executed_workbook(tmp_path / "out", _02_train=cells))
    end = html.read_text().partition('id="claims"')[2]
    assert "rest on 2 claims" in end
    assert "1 of them do not hold" in end
    assert re.search(r'href="#answer-02_train-adamw-b">adamw \(b\)</a></td>\s*<td>it falls</td>', end)
    assert "it is there" not in end
    text = pdf_text(pdf)
    assert text.index("The last section") < text.rindex("it falls")


def test_long_tables_stand_in_the_appendix_of_the_pdf(tmp_path):
    rows = "\n".join(f"| row{i} | {i} |" for i in range(80))
    shown = display({"text/markdown": f"| name | value |\n|---|---|\n{rows}"})
    cells = ["# 01 Build", "## How long", cell(shown), "The end."]
    html, pdf = write_writeup(executed_workbook(tmp_path / "out", _01_build=cells))
    assert html.read_text().index("row79") < html.read_text().index("The end.")
    pages = [page.extract_text() for page in pypdf.PdfReader(pdf).pages]
    assert " ".join(pages).index("The end.") < " ".join(pages).index("row0")
    assert re.search(rf"Table A.1, page {next(n for n, t in enumerate(pages, 1) if 'row0' in t)}\b", " ".join(pages))
    assert "Table A.1: How long" in " ".join(pages)
    assert all("name" in page and "value" in page for page in pages if re.search(r"row\d", page))  # the head repeats


def test_what_belongs_together_is_on_one_page_of_the_pdf(tmp_path):
    """At whatever height of the page it begins: three rows of a table and more, a problem and its answer."""
    cells = ["# 01 Build"]
    for number in range(20):
        rows = "\n".join(f"| table{number:02}row{i:02} | {i} |" for i in range(24))
        cells += [
            "\n\n".join(["A line of text."] * number),
            cell(display({"text/markdown": f"| name | value |\n|---|---|\n{rows}"})),
            "\n\n".join(["A line of text."] * (number % 5)),
            f"**Problem `linear`.** Is question {number} beside its answer?",
            cell(show(answers.answer("linear", f"So is answer {number}."))),
        ]
    pages = [
        page.extract_text()
        for page in pypdf.PdfReader(write_writeup(executed_workbook(tmp_path, _01_build=cells))[1]).pages
    ]
    rows = [Counter(re.findall(r"table(\d\d)row", page)) for page in pages]
    assert sum(len(found) for found in rows) > 20  # some of the tables are divided
    assert min(count for found in rows for count in found.values()) >= 3
    for number in range(20):
        assert [f"question {number} beside" in page for page in pages] == [
            f"answer {number}." in page for page in pages
        ]


def test_what_is_published(tmp_path):
    out = executed_workbook(tmp_path / "out", _01_build=FIRST, _02_train=SECOND)
    injected = new_code_cell(
        "out = '/home/someone/runs'", metadata={"tags": ["injected-parameters"]}, execution_count=1
    )
    notebook = nbformat.read(out / "notebooks" / "01_build.ipynb", as_version=4)
    notebook.cells.insert(1, injected)
    notebook.metadata = {"kernelspec": {}, "language_info": {}, "papermill": {"output_path": "/home/someone/x.ipynb"}}
    nbformat.write(notebook, out / "notebooks" / "01_build.ipynb")
    other = nbformat.read(out / "notebooks" / "02_train.ipynb", as_version=4)
    other.metadata = {"kernelspec": {}, "language_info": {}}
    nbformat.write(other, out / "notebooks" / "02_train.ipynb")
    (out / "figures").mkdir()
    (out / "figures" / "loss.svg").write_text(SVG)
    (tmp_path / "to" / "figures").mkdir(parents=True)
    (tmp_path / "to" / "figures" / "old.svg").write_text(SVG)
    files = publish.publish(out, tmp_path / "to")
    names = ["answers.html", "answers.pdf", "figures/loss.svg"]
    names += ["notebooks/01_build.ipynb", "notebooks/02_train.ipynb"]
    there = [path for path in (tmp_path / "to").rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path / "to").as_posix() for path in there) == names
    assert len(files) == 5
    text = (tmp_path / "to" / "notebooks" / "01_build.ipynb").read_text()
    assert "/home/someone" not in text
    assert "svg+xml" not in text
    assert "warning!" not in text
    shown = nbformat.reads(text, as_version=4)
    pictures = [o for c in shown.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    assert base64.b64decode(pictures[0].data["image/png"]).startswith(b"\x89PNG")
    assert "*Figure 1.1.* Loss by $\\\\theta$" in text


@pytest.mark.parametrize("place", ["/home/someone/lmcore/runs/x", "/work/lmcore", "/scratch/u/results"])
def test_names_of_a_machine_are_not_published(tmp_path, place):
    said = cell(stream(f"saved in {place}"))
    out = executed_workbook(tmp_path / "out", _01_build=["# 01 Build", said])
    notebook = nbformat.read(out / "notebooks" / "01_build.ipynb", as_version=4)
    notebook.metadata = {"kernelspec": {}, "language_info": {}}
    nbformat.write(notebook, out / "notebooks" / "01_build.ipynb")
    with pytest.raises(UserError, match=f"01_build, cell 2 names something of this machine, '{place}'"):
        publish.publish(out, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_an_incomplete_workbook_is_not_published(tmp_path):
    out = executed_workbook(tmp_path / "out", state="stopped", _01_build=FIRST[:1])
    with pytest.raises(UserError, match="Only a complete workbook is published"):
        publish.publish(out, tmp_path / "to")


def test_published_notebooks_have_small_pictures_and_no_machine():
    for path in (ROOT / "writeup").glob("*/notebooks/*.ipynb"):
        text = path.read_text(encoding="utf-8")
        publish.refuse_machine_names(path.name, re.sub(r'"image/png": "[^"]*"', "", text))
        assert "svg+xml" not in text
        assert '"image/png"' in text
        assert len(text) < 3e6


def covered(*answered):
    """The handouts' problems by handout and name, given answers: problem, part, notebook, what is missing."""
    problems = coverage.coverage(
        coverage.Answered(problem, part, notebook, missing=missing) for problem, part, notebook, missing in answered
    )
    return {(problem.handout, problem.name): problem for problem in problems}


def test_coverage_counts_parts():
    found = covered(("memory_profiling", "a", "", ""), ("adamw_accounting", "", "", ""))
    memory = found["CS336 A2 2026", "memory_profiling"]
    assert (memory.state, memory.missing) == ("partly", "(b) (c) (d) (e) (f)")
    assert found["CSE599-O A1 part 1", "adamwAccounting"].state == "done"  # the handouts spell it in two ways
    assert found["CSE599-O A1 part 1", "adamw"].state == "not yet"
    assert coverage.counts(found.values())["CS336 A2 2026"] == {"done": 0, "partly": 1, "not yet": 26, "problems": 27}


def test_a_problem_of_one_assignment_is_not_that_of_another():
    answered = ("leaderboard", "A1", "08_experiments", ""), ("leaderboard", "A2", "09_distributed", "")
    found = {p.handout: p.state for p in covered(answered[0]).values() if p.name == "leaderboard"}
    assert found == {"CSE599-O A1 part 1": "done", "CS336 A1 2026": "done", "CS336 A2 2026": "not yet"}
    page = coverage.coverage_markdown(covered(*answered).values())
    assert re.findall(r"^\| `leaderboard` .*\[(\w+)\]", page, re.MULTILINE) == ["08_experiments"] * 2 + [
        "09_distributed"
    ]


def test_an_answer_that_lacks_what_is_asked_for_makes_its_problem_partly_done():
    parts = [("memory_profiling", letter, "06_memory", "") for letter in "abcde"]
    found = covered(*parts, ("memory_profiling", "f, CS336", "06_memory", "the viewer's pictures"))
    states = {handout: problem.state for (handout, name), problem in found.items() if name == "memory_profiling"}
    assert states == {"CSE599-O A1 part 2": "done", "CS336 A2 2025": "done", "CS336 A2 2026": "partly"}
    row = (
        "| `memory_profiling` | p. 9 | partly | (f) the viewer's pictures | [06_memory](../notebooks/06_memory.ipynb) |"
    )
    assert row in coverage.coverage_markdown(found.values()).splitlines()
    assert "| CS336 A2 2026 | 0 | 1 | 26 | 27 |" in coverage.counts_markdown(found.values())
    of = "| `memory_profiling` | CS336 A2 2026, p. 9 | (f) the viewer's pictures |"
    assert coverage.partly_markdown(found.values()).splitlines()[2:] == [of]


PARTLY = {  # what the handout asks for and the records of the H200 lack
    ("CSE599-O A1 part 1", "learning rate"): "1.45",
    ("CSE599-O A1 part 1", "main_experiment"): "the course's corpus",
    ("CSE599-O A1 part 1", "leaderboard"): "a run of the budget",
    ("CS336 A1 2026", "train_bpe_tinystories"): "whole corpus",
    ("CS336 A1 2026", "train_bpe_expts_owt"): "whole corpus",
    ("CS336 A1 2026", "tokenizer_experiments"): "whole corpora",
    ("CS336 A1 2026", "learning_rate"): "1.45",
    ("CS336 A1 2026", "main_experiment"): "the course's corpus",
    ("CS336 A1 2026", "leaderboard"): "a run of the budget",
    ("CSE599-O A1 part 2", "memory_profiling"): "memory_viz",
    ("CS336 A2 2025", "memory_profiling"): "memory_viz",
    ("CS336 A2 2025", "flash_benchmarking"): "do_bench",
    ("CS336 A2 2026", "memory_profiling"): "Nsight",
    ("CS336 A2 2026", "flash_benchmarking"): "do_bench",
    ("CS336 A2 2025", "ddp_overlap_individual_parameters_benchmarking"): "Nsight",
    ("CS336 A2 2026", "ddp_overlap_individual_parameters_benchmarking"): "Nsight",
    ("CS336 A2 2026", "fsdp_accounting"): "Nsight",
    ("CS336 A2 2025", "distributed_communication_single_node"): "6 GPUs",
    ("CS336 A2 2026", "distributed_communication_single_node"): "6 GPUs",
    ("CS336 A2 2026", "leaderboard"): "B200",
    ("WikiText-103 report", "optimization report"): "whole of WikiText-103",
}


def test_the_committed_coverage_says_what_is_missing():
    """At least these are partly done, and README's line counts what is done alone."""
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n\n(.+?)(?=\n\n|\Z)", page, re.MULTILINE | re.DOTALL))
    rows = {
        (handout, name): (state, missing)
        for handout, table in sections.items()
        for name, state, missing in re.findall(r"^\| `(.+?)` \| .+? \| (.+?) \| (.*?) \|", table, re.MULTILINE)
    }
    for place, words in PARTLY.items():
        assert rows[place][0] == "partly", place
        assert words in rows[place][1], place
    assert all((state == "partly") == bool(missing) for state, missing in rows.values())
    done = {handout: [state for (of, _), (state, _) in rows.items() if of == handout] for handout in sections}
    line = ", ".join(f"{handout}: {states.count('done')}/{len(states)}" for handout, states in done.items())
    assert f"{line}." in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_committed_coverage_claims_no_more_than_the_notebooks_answer():
    problems = [problem for answered in read_json(ANSWERS).values() for problem in answered]
    answered = {coverage.plain_name(problem.partition(" (")[0]) for problem in problems}
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|", (ROOT / "docs" / "coverage.md").read_text(), re.MULTILINE)
    assert len(rows) == len(coverage.coverage([]))
    assert {coverage.plain_name(name) for name, _, state in rows if state != "not yet"} <= answered


def test_text_helpers():
    assert plain_text("a\rb\x1b[0m\nc\x00\t|") == "b\nc␀  |"
    assert shorten("\n".join("abcdef"), 4) == "a\nb\n… 2 lines left out …\ne\nf"
    assert shorten("a\nb", 4) == "a\nb"
    assert break_lines("abcdef\n\ngh", 4) == "abcd\nef\n\ngh"
    assert break_lines("abcd ef gh", 6) == "abcd \nef gh"
    assert spell_out("≥ × θ — “x” … 世\U000e0061") == "≥ × θ — “x” … ⟨U+4E16⟩"


def test_answer():
    shown = answers.answer("adamwAccounting (b)", "  About 3.")
    assert shown.data == "> **Answer — adamwAccounting (b).** About 3."
    found = {"problem": "adamwAccounting", "part": "b", "values": {}, "claims": {}, "missing": ""}
    assert shown.metadata[answers.METADATA_KEY] == found
    assert answers.answer("adamw", "- one\n- two").data.startswith("> **Answer — adamw.**\n>\n> - one\n> - two")
    with pytest.raises(UserError, match="empty"):
        answers.answer("adamw", "  ")
    with pytest.raises(UserError, match="named like"):
        answers.answer("(b)", "x")


def test_an_answer_from_values_says_which_claims_do_not_hold():
    template = "{sizes} take {time:seconds} and {memory:bytes}, {share:.0%} of $x^{{2}}$."
    values = {"sizes": ["small", "large"], "time": np.float64(0.0123), "memory": 3e9, "share": 0.5}
    claims = {"it falls": np.array([True, False]), "it is there": True}
    shown = answers.answer("adamw", template, claims, **values)
    assert shown.data.startswith("> **Answer — adamw.** small and large take 12.3 ms and 3.00 GB, 50% of $x^{2}$.")
    assert shown.data.endswith("*Does not hold on this machine:* it falls.")
    found = shown.metadata[answers.METADATA_KEY]
    assert found["values"] == values
    assert found["claims"] == {"it falls": False, "it is there": True}
    json.dumps(found)


def test_an_answer_says_what_is_missing():
    shown = answers.answer(
        "learning_rate (a)", "It is {best}.", missing="a loss of {asked} ({best} here)", best=2, asked=1
    )
    assert shown.data == "> **Answer — learning_rate (a).** It is 2.\n>\n> *Missing:* a loss of 1 (2 here)."
    assert shown.metadata[answers.METADATA_KEY]["missing"] == "a loss of 1 (2 here)"


def test_what_was_not_measured_is_said():
    shown = answers.answer("adamw", "It takes {sizes:bytes}.", {"it is small": np.nan < 1}, sizes=[1e9, np.nan])
    assert "It takes 1.00 GB and (not measured)." in shown.data
    assert "*Does not hold on this machine:* it is small." in shown.data
    assert shown.metadata[answers.METADATA_KEY]["values"] == {"sizes": [1e9, None]}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (formatting.format_count, 5, "5"),
        (formatting.format_count, 12345, "12,345"),
        (formatting.format_count, 999_999, "1.00 million"),
        (formatting.format_count, 1_640_000_000, "1.64 billion"),
        (formatting.format_count, 2.5, "2.50"),
        (formatting.format_bytes, 999, "999 bytes"),
        (formatting.format_bytes, 999_999, "1.00 MB"),
        (formatting.format_bytes, 6.55e9, "6.55 GB"),
        (formatting.format_seconds, 0, "0 s"),
        (formatting.format_seconds, 3.5e-4, "350 µs"),
        (formatting.format_seconds, 0.0123, "12.3 ms"),
        (formatting.format_seconds, 0.9999, "1.00 s"),
        (formatting.format_seconds, 59.96, "1 min"),
        (formatting.format_seconds, 200, "3 min 20 s"),
        (formatting.format_seconds, 18720, "5 h 12 min"),
        (formatting.format_seconds, 8e5, "9.26 days"),
        (formatting.format_percent, 0.1234, "12.3%"),
        (formatting.format_significant, 0.000123456, "0.000123"),
        (formatting.format_significant, 0.9996, "1.00"),
        (formatting.join_words, ["a"], "a"),
        (formatting.join_words, ["a", "b", "c"], "a, b and c"),
    ],
)
def test_wording(function, value, text):
    assert function(value) == text


@given(st.floats(1e-9, 1e15))
def test_significant_digits_keep_the_value(value):
    shown = float(formatting.format_significant(value, 4).replace(",", ""))
    assert shown == pytest.approx(value, rel=6e-4)
