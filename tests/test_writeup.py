"""The writeup from executed notebooks, what is published of them, and answers and their wording."""

import base64
import dataclasses
import json
import os
import re
from pathlib import Path

import nbformat
import numpy as np
import pypdf
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lmcore import formatting
from lmcore.errors import UserError
from lmcore.files import read_json, write_json
from workbook import publish
from workbook.notebook import CLEAN_METADATA
from workbook.record import NotebookRecord, read_record, read_records, write_record
from workbook.report import answers, coverage
from workbook.report.document import plain_text
from workbook.report.notebook import show_source
from workbook.report.verify import check_writeup
from workbook.report.writeup import provenance, write_writeup

ROOT = Path(__file__).parents[1]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAC0lEQVR4nGNgQAYAAA4AAamRc7EAAAAASUVORK5CYII="
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="90"><rect width="9" height="9"/></svg>'


def display(data: dict, **metadata) -> nbformat.NotebookNode:
    return new_output("display_data", data, metadata=metadata)


def stream(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def cell(*outputs, tags=(), **metadata) -> nbformat.NotebookNode:
    return new_code_cell("hidden_source_code = 1", outputs=list(outputs), metadata={"tags": list(tags), **metadata})


def show(thing) -> nbformat.NotebookNode:
    """The output that IPython makes of an object."""
    data, metadata = InteractiveShell.instance().display_formatter.format(thing)
    return new_output("display_data", data, metadata=metadata)


def executed_workbook(folder, state="done", **notebooks):
    """A workbook folder with these notebooks as if they had been executed."""
    (folder / "notebooks").mkdir()
    environment = {"python": "3.11", "device": "CPU", "git_commit": "abcdef1234567890", "time_utc": "2026-01-01"}
    names = [name.lstrip("_") for name in notebooks]
    for name, cells in zip(names, notebooks.values(), strict=True):
        made = [new_markdown_cell(c) if isinstance(c, str) else c for c in cells]
        for number, code in enumerate((c for c in made if c.cell_type == "code"), 1):
            code.execution_count = number
        notebook = new_notebook(cells=made, metadata=CLEAN_METADATA)
        nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")
        record = NotebookRecord(name, state, 1.5, scale="smoke", data="embedded", environment=environment)
        write_record(folder, record)
    return folder


def change_record(out, name, **fields):
    """Changes the record of a notebook; those of its environment one by one."""
    record = read_record(out, name)
    fields["environment"] = record.environment | fields.get("environment", {})
    write_record(out, dataclasses.replace(record, **fields))


def pages_of(pdf) -> list[str]:
    return [re.sub(r"\s+", " ", page.extract_text()) for page in pypdf.PdfReader(pdf).pages]


FIRST = [
    "# 01 Build\n\nThe sigmoid $\\sigma(x) = \\frac{1}{1 + e^{-x}}$, see [training](02_train.ipynb), "
    "[below](#Wide-Table) and [nowhere](#gone). $a \\odot b \\otimes c \\ominus d$\n- a list\n\n"
    "$$\\text{softmax}(v)_i = \\frac{e^{v_i}}{\\sum_j e^{v_j}}$$\n\n"
    "![a picture beside the notebook](beside.svg) and ![a remote picture](https://example.org/x.png)",
    cell(
        display({"image/svg+xml": SVG, "text/plain": "<Figure>"}, **{"image/svg+xml": {"caption": "Loss by $\\theta$"}})
    ),
    cell(display({"image/png": PNG}), caption="A caption of the cell"),
    "## Wide Table",
    cell(display({"text/markdown": f"|{'column_name |' * 18}\n|{'---|' * 18}\n|{'-1.123456 |' * 18}"})),
    cell(stream("never shown"), stream("warning!", "stderr")),
    cell(stream("\x1b[31mred\x1b[0m 10%\r99% こ ```\n" + "w" * 300), tags=["show_stdout"]),
    cell(stream("printed, the same each time"), tags=["keep_output"]),
    cell(display({"text/plain": "[<matplotlib.lines.Line2D at 0x7f0000000000>]"})),
    cell(show(show_source(plain_text))),
    cell(display({"text/plain": "left out"}), tags=["remove_output"]),
    cell(show(answers.answer("transformer_accounting (a)", "There are **1.64 billion** parameters."))),
    cell(show(answers.answer("transformer_accounting (b)", "| part | share |\n|---|---|\n| the ffn | 60.5 ms |"))),
    cell(show(answers.answer("transformer_accounting (b)", "Again."))),
]
SECOND = ["# 02 Train\n\nBack to [the table](01_build.ipynb#Wide-Table).", cell(show(answers.answer("adamw", "Done.")))]


@pytest.fixture(scope="module")
def writeup(tmp_path_factory):
    """The folder, and the text of the PDF."""
    out = executed_workbook(tmp_path_factory.mktemp("workbook"), _01_build=FIRST, _02_train=SECOND)
    (out / "notebooks" / "beside.svg").write_text(SVG)
    return out, " ".join(pages_of(write_writeup(out)))


def test_the_pdf_has_everything_that_is_to_be_seen_and_nothing_else(writeup):
    out, text = writeup
    found = check_writeup(out)
    assert {key: found[key] for key in ("notebooks", "figures", "answers")} == {
        "notebooks": 2, "figures": 3, "answers": 4
    }  # fmt: skip
    shown = [*"⊙⊗⊖", "99% ⟨U+3053⟩ ```", "printed, the same each time", "Figure 1.1. Loss by", "A caption of the cell"]
    shown += ["a remote picture", "nowhere", "Answer — transformer_accounting (a). There are 1.64 billion"]
    for words in (*shown, "60.5 ms", "smoke", "embedded", "abcdef123456", "CPU", "python 3.11"):
        assert words in text, words
    hidden = ["hidden_source_code", "never shown", "warning!", "Line2D", "left out", "def plain_text", "10%", "[31m"]
    for words in (*hidden, "example.org", "failed", r"\frac", r"\theta"):
        assert words not in text, words


def test_problems_are_listed_with_their_states_and_links(writeup):
    listed = writeup[1].replace("\u200b", "").partition("answers: notebook (part)")[2]
    assert re.search(r"adamw ✓ CSE599-O A1 part 1, §4.3; ✓ CS336 A1 2026, \S+ \S+ 2, p. \d", listed)
    assert re.search(
        r"transformer_accounting [^✓]*◐ [^✓]*§3.6[^✓]* 1 \(a\), p. \d+, 1 \(b\), p. \d+, 1 \(b\), p. \d+", listed
    )


def test_provenance_names_each_machine_once_and_what_was_measured_elsewhere(tmp_path):
    out = executed_workbook(tmp_path, _01_build=FIRST[:1], _02_train=SECOND, _03_generate=SECOND)
    for number, name in enumerate(("01_build", "02_train", "03_generate")):
        commit = "abcdef1234567890" if number < 2 else "0123456789abcdef"
        device, time = ("GPU" if number else "CPU"), f"2026-01-0{3 - number}"
        change_record(out, name, environment={"device": device, "git_commit": commit, "time_utc": time})
    found = provenance(out, read_records(out))
    assert (found["Measured on"], found["Code"]) == ("CPU; GPU", "abcdef123456; 0123456789ab")
    assert found["Executed"] == "2026-01-01, 4.50 s, at abcdef123456; 0123456789ab on CPU; GPU"
    measured = read_json(ROOT / "results" / "h200" / "training_runs.json")
    changes = {"git_commit": ["abcdef0123456789", "fedcba9876543210"], "git_dirty": [None, True]}
    changes["device"] = ["NVIDIA H200", "NVIDIA H100"]  # dealt out
    write_json(out / "results" / "runs.json", measured | {"provenance": measured["provenance"] | changes})
    found = provenance(out, read_records(out))
    assert (found["Measured on"], found["Data"]) == ("NVIDIA H200; NVIDIA H100", "tinystories")
    assert found["Code"] == "abcdef012345 and fedcba987654 with uncommitted changes"


def test_check_finds_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match="There is no workbook in"):
        write_writeup(tmp_path)
    out = executed_workbook(tmp_path, _01_build=FIRST[:3], _02_train=SECOND)
    with pytest.raises(UserError, match="There is no writeup"):
        check_writeup(out)
    pdf = write_writeup(out)
    check_writeup(out)
    first, second = (out / "notebooks" / f"{name}.ipynb" for name in ("01_build", "02_train"))
    figures = nbformat.read(first, as_version=4)
    figures.cells.append(cell(*FIRST[1].outputs))
    for notebook, old, new, words in (
        (second, "# 02 Train", "# 02 Another title", "lacks '02 Another title'"),
        (second, '"problem": "adamw"', '"problem": "adamw_again"', r"lacks 'Answer: adamw_again'"),
        (first, first.read_text(), nbformat.writes(figures), "shows 2 of 3 figures"),
    ):
        source = notebook.read_text()
        notebook.write_text(source.replace(old, new, 1))
        with pytest.raises(UserError, match=f"is older than notebook {notebook.stem}"):
            check_writeup(out)
        os.utime(notebook, (1e9, 1e9))
        with pytest.raises(UserError, match=words):
            check_writeup(out)
        notebook.write_text(source)
        os.utime(notebook, (1e9, 1e9))
    pdf.write_bytes(pdf.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a sound PDF"):
        check_writeup(out)


def test_what_is_published(tmp_path):
    out, to = executed_workbook(tmp_path, _01_build=FIRST, _02_train=SECOND), tmp_path / "to"
    file = out / "notebooks" / "01_build.ipynb"
    notebook = nbformat.read(file, as_version=4)
    injected = {"tags": ["injected-parameters"]}
    notebook.cells.insert(1, new_code_cell("out = '/home/someone/runs'", metadata=injected, execution_count=1))
    notebook.metadata["papermill"] = {"output_path": "/home/someone/x.ipynb"}
    nbformat.write(notebook, file)
    for place in (out / "figures" / "loss.svg", to / "figures" / "old.svg"):
        place.parent.mkdir(parents=True)
        place.write_text(SVG)
    publish.publish(out, to)
    published = {path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()}
    assert published == {"answers.pdf", "figures/loss.svg", "notebooks/01_build.ipynb", "notebooks/02_train.ipynb"}
    text = (to / "notebooks" / "01_build.ipynb").read_text()
    for words in ("/home/someone", "svg+xml", "warning!"):
        assert words not in text
    shown = nbformat.reads(text, as_version=4)
    pictures = [o for c in shown.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert [base64.b64decode(picture.data["image/png"])[:4] for picture in pictures] == [b"\x89PNG"] * 2
    assert "*Figure 1.1.* Loss by $\\\\theta$" in text


def test_what_is_not_done_or_names_a_machine_is_not_published(tmp_path):
    out = executed_workbook(tmp_path, _01_build=["# 01 Build", cell(stream("saved in /work/lmcore"))])
    with pytest.raises(UserError, match="01_build, cell 2 names something of this machine, '/work/lmcore'"):
        publish.publish(out, tmp_path / "to")
    change_record(out, "01_build", state="stopped")
    with pytest.raises(UserError, match="Only a complete workbook is published"):
        publish.publish(out, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_published_notebooks_have_small_pictures_and_no_machine():
    for path in (ROOT / "writeup").glob("*/notebooks/*.ipynb"):
        text = path.read_text(encoding="utf-8")
        publish.refuse_machine_names(path.name, re.sub(r'"image/png": "[^"]*"', "", text))
        assert "svg+xml" not in text
        assert '"image/png"' in text
        assert len(text) < 3e6


def covered(*answered: coverage.Answered) -> dict:
    """The handouts' problems by handout and name, given answers."""
    return {(problem.handout, problem.name): problem for problem in coverage.coverage(answered)}


def test_coverage_counts_parts_handouts_and_what_answers_lack():
    given = [("adamw_accounting", ""), ("leaderboard", "A1"), *(("memory_profiling", letter) for letter in "abcde")]
    answered = [coverage.Answered(problem, part, "06_memory") for problem, part in given]
    assert covered(*answered)["CS336 A2 2026", "memory_profiling"].missing == "(f)"
    found = covered(
        *answered, coverage.Answered("memory_profiling", "f, CS336", "06_memory", missing="the viewer's pictures")
    )
    states = {(handout, name): problem.state for (handout, name), problem in found.items()}
    assert states["CSE599-O A1 part 1", "adamwAccounting"] == "done"  # the handouts spell it in two ways
    assert states["CSE599-O A1 part 1", "adamw"] == "not yet"
    assert [states[handout, "leaderboard"] for handout in ("CS336 A1 2026", "CS336 A2 2026")] == ["done", "not yet"]
    memory = [states[handout, "memory_profiling"] for handout in ("CSE599-O A1 part 2", "CS336 A2 2026")]
    assert memory == ["done", "partly"]
    row = "| `memory_profiling` | p. 9 | partly | (f) the viewer's pictures | [06_memory]"
    assert row in coverage.coverage_markdown(found.values())
    of = "| `memory_profiling` | CS336 A2 2026, p. 9 | (f) the viewer's pictures |"
    assert coverage.partly_markdown(found.values()).splitlines()[2:] == [of]
    assert coverage.counts(found.values())["CS336 A2 2026"] == {"done": 0, "partly": 1, "not yet": 26, "problems": 27}


def test_an_answer_says_what_does_not_hold_what_is_missing_and_what_was_not_measured():
    assert answers.answer("adamw", "- one\n- two").data.startswith("> **Answer — adamw.**\n>\n> - one\n> - two")
    template = "{sizes} take {time:seconds} and {memory:bytes}, {share:.0%} of $x^{{2}}$."
    values = {"sizes": ["small", "large"], "time": np.float64(0.0123), "memory": [3e9, np.nan], "share": 0.5}
    claims = {"it falls": np.array([True, False]), "it is there": True, "it is small": np.nan < 1}
    shown = answers.answer("adamw (b)", template, claims, "a share of {asked} ({share} here)", **values, asked=1)
    told = "small and large take 12.3 ms and 3.00 GB and (not measured), 50% of $x^{2}$."
    assert shown.data == (
        f"> **Answer — adamw (b).** {told}\n>\n> *Missing:* a share of 1 (0.5 here).\n>\n"
        "> *Does not hold on this machine:* it falls; it is small."
    )
    found = json.loads(json.dumps(shown.metadata[answers.METADATA_KEY]))
    assert (found["problem"], found["part"], found["missing"]) == ("adamw", "b", "a share of 1 (0.5 here)")
    assert found["values"] == values | {"memory": [3e9, None], "asked": 1}
    assert found["claims"] == {"it falls": False, "it is there": True, "it is small": False}
    for problem, text, words in (("adamw", "  ", "empty"), ("(b)", "x", "named like")):
        with pytest.raises(UserError, match=words):
            answers.answer(problem, text)


WORDING = [
    (formatting.format_count, 999_999, "1.00 million"),
    (formatting.format_bytes, 999, "999 bytes"),
    (formatting.format_bytes, 999_999, "1.00 MB"),
    (formatting.format_seconds, 3.5e-4, "350 µs"),
    (formatting.format_seconds, 0.9999, "1.00 s"),
    (formatting.format_seconds, 59.96, "1 min"),
    (formatting.format_seconds, 18720, "5 h 12 min"),
    (formatting.format_percent, 0.1234, "12.3%"),
    (formatting.format_significant, 0.9996, "1.00"),
    (formatting.join_words, ["a", "b", "c"], "a, b and c"),
]


@pytest.mark.parametrize(("function", "value", "text"), WORDING)
def test_wording(function, value, text):
    assert function(value) == text
