"""The writeup from executed notebooks, what is published of them, and answers and their wording."""

import base64
import dataclasses
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import nbformat
import numpy as np
import pypdf
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from lmcore import formatting
from lmcore.errors import UserError
from lmcore.files import read_json, write_json
from workbook.notebook import CLEAN_METADATA
from workbook.record import NotebookRecord, read_record, read_records, write_record
from workbook.report import answers, coverage, wording
from workbook.report.verify import pages_and_keywords, writeup_faults
from workbook.report.writeup import HANDOUTS, provenance, write_writeup
from workbook.seal import SEAL, cell_hashes, seal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "results"))
import publish  # noqa: E402 - scripts beside the results
import tables  # noqa: E402

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="90"><rect width="9" height="9"/></svg>'


def tiny_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


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
    for name in names:
        seal(folder, name)
    return folder


def change_record(out, name, **fields):
    """Changes the record of a notebook; those of its environment one by one."""
    record = read_record(out, name)
    fields["environment"] = record.environment | fields.get("environment", {})
    write_record(out, dataclasses.replace(record, **fields))


def text_of(pdf) -> str:
    """A PDF's text in one line, without the marks at which long names may be broken."""
    text = " ".join(page.extract_text() for page in pypdf.PdfReader(pdf).pages)
    return re.sub(r"\s+", " ", text.replace("\u200b", ""))


FIRST = [
    "# 01 Build\n\nText of a notebook is not handed in.",
    "## Model",
    cell(display({"text/markdown": "| column |\n|---|\n| of another answer |"})),
    cell(show(answers.answer("linear", "`Linear` is a | matrix.\n\nIt is tested."))),
    cell(display({"image/svg+xml": SVG}, **{"image/svg+xml": {"caption": "Share by $\\theta$"}})),
    cell(display({"image/png": base64.b64encode(tiny_png()).decode()}), caption="A caption of the cell"),
    cell(display({"text/markdown": f"|{'column_name |' * 18}\n|{'---|' * 18}\n|{'-1.123456 |' * 18}"})),
    cell(stream("never shown"), stream("warning!", "stderr")),
    cell(display({"text/markdown": "left out"}), tags=["not_in_writeup"]),
    cell(show(answers.answer("transformer_accounting (b)", "| part | share |\n|---|---|\n| the ffn | 60.5 ms |"))),
    cell(
        show(answers.answer("transformer_accounting (a)", "There are **1.64 billion**, $a \\odot b \\otimes c$, こ."))
    ),
    "## Another section",
    cell(show(answers.answer("roofline", "Asked for by no handout."))),
    cell(display({"image/svg+xml": "<svg"}), caption="A broken picture"),
    cell(display({"text/markdown": "> **Once** upon a time"})),
    cell(
        show(
            answers.answer(
                "learning_rate_tuning",
                "See [here](https://example.org), [there](02_train.ipynb), [run](javascript:x) <b>bold</b> "
                '`#read("/etc/passwd")` and ![gone](gone.png), ![outside](/etc/hostname).',
                missing="a thing",
            )
        )
    ),
]
SECOND = ["# 02 Train", cell(show(answers.answer("Run Training Loop (a)", "Done.")))]


@pytest.fixture(scope="module")
def writeup(tmp_path_factory):
    """The folder, and the text of each PDF by its name."""
    out = executed_workbook(tmp_path_factory.mktemp("workbook"), _01_build=FIRST, _02_train=SECOND)
    return out, {pdf.stem: text_of(pdf) for pdf in write_writeup(out)}


def test_each_handout_has_its_problems_in_its_order_and_no_code(writeup):
    out, texts = writeup
    assert set(texts) == {"cse599o-a1-part1", "cse599o-a1-part2", "cs336-a1"}
    assert not writeup_faults(out)
    text = texts["cs336-a1"]
    shown = [
        "Measured on (at the commits): CPU (abcdef12)",
        "Text: embedded",
        "Answered in part",
        "learning_rate_tuning: a thing",
    ]
    shown += ["linear (p. 18, 1 point) Linear is a | matrix. It is tested. test_model.py"]
    shown += ["transformer_accounting (p. 27, 5 points) (a) There are 1.64 billion", "(b) part share the ffn 60.5 ms"]
    shown += ["A caption of the cell", "learning_rate_tuning (p. 31, 1 point)", "A broken picture", "Once upon a time"]
    places = [text.find(words) for words in shown]
    assert -1 not in places, shown[places.index(-1)]
    assert places == sorted(places)
    assert [words for words in ("⊙", "⟨U+3053⟩", '#read("/etc/passwd")') if words not in text] == []
    hidden = [
        "hidden_source_code",
        "never shown",
        "warning!",
        "left out",
        "column_name",
        "of another answer",
        "Share by",
    ]
    for words in (*hidden, "Asked for by no handout", "Text of a notebook", "02_train", r"\theta", "Answer —", "<b>"):
        assert words not in text, words
    links = [
        note.get_object().get("/A", {}).get("/URI")
        for page in pypdf.PdfReader(out / "writeup" / "cs336-a1.pdf").pages
        for note in page.get("/Annots") or []
    ]
    assert links == ["https://example.org"]


def test_the_report_is_its_notebook(tmp_path):
    cells = ["# WikiText", "## Setting\n\nA text.", cell(show(answers.answer("optimization report (x)", "Found.")))]
    cells.insert(2, new_markdown_cell("An exercise.", metadata={"tags": ["not_in_writeup"]}))
    out = executed_workbook(tmp_path, _10_wikitext=cells)
    (pdf,) = write_writeup(out)
    assert pdf.stem == "wikitext103-report"
    assert "Setting A text. Found." in text_of(pdf)


def test_provenance_names_each_machine_once_and_what_was_measured_elsewhere(tmp_path):
    out = executed_workbook(tmp_path, _01_build=FIRST[:1], _02_train=SECOND, _03_generate=SECOND)
    for number, name in enumerate(("01_build", "02_train", "03_generate")):
        commit = "abcdef1234567890" if number < 2 else "0123456789abcdef"
        change_record(out, name, environment={"device": "GPU" if number else "CPU", "git_commit": commit})
    found = provenance(read_records(out), [{}])
    assert found["Measured on (at the commits)"] == "CPU (abcdef12); GPU (01234567, abcdef12)"
    measured = read_json(ROOT / "results" / "h200" / "training_runs.json")
    changes = {"git_commit": ["abcdef0123456789", "fedcba9876543210"], "git_dirty": [None, True]}
    changes["device"] = ["NVIDIA H200", "NVIDIA H100"]  # dealt out
    found = provenance(read_records(out), [measured | {"provenance": measured["provenance"] | changes}])
    both = "abcdef01 with uncommitted changes, fedcba98 with uncommitted changes"
    assert found["Measured on (at the commits)"] == f"NVIDIA H200 ({both}); NVIDIA H100 ({both})"
    assert found["Text"] == "tinystories"


def test_every_state_has_its_sentence(tmp_path):
    out = executed_workbook(tmp_path, _01_build=FIRST[:1], _02_train=SECOND, _03_generate=SECOND)
    change_record(out, "02_train", state="failed", cell=3, error="ValueError: no_such|luck")
    change_record(out, "03_generate", state="running")
    (out / "notebooks" / "03_generate.ipynb").unlink()  # it was killed before anything was saved
    (text, *_) = (text_of(pdf) for pdf in write_writeup(out))
    failed = "Notebook 02_train failed at code cell 3: ValueError: no_such|luck."
    assert f"{failed} Notebook 03_generate was stopped before its end." in text


def test_what_was_changed_by_hand_or_is_not_of_these_notebooks_is_named(tmp_path):
    with pytest.raises(UserError, match="There is no workbook in"):
        write_writeup(tmp_path)
    out = executed_workbook(tmp_path, _01_build=FIRST, _02_train=SECOND)
    write_json(out / "results" / "losses.json", {"loss": 1.5})
    write_json(out / "runs" / "small" / "metrics.jsonl", {"loss": 1.5})
    for name in ("01_build", "02_train"):
        seal(out, name)
    assert re.search(r"There is no .*cse599o-a1-part1.pdf: run", writeup_faults(out)[0])
    pdf = write_writeup(out)[0]
    os.utime(pdf, (1e9, 1e9))  # older than what it was made from, by the clock
    assert not writeup_faults(out)
    for file, old, new, words in (
        ("notebooks/02_train.ipynb", "Done.", "Won.", "Notebook 02_train: cell 2 is not what was executed"),
        ("notebooks/01_build.ipynb", "1.64 billion", "1.65 billion", "Notebook 01_build: cell 11 is not what"),
        ("results/losses.json", "1.5", "1.4", "losses.json is not what notebook 01_build made"),
        ("runs/small/metrics.jsonl", "1.5", "1.4", "metrics.jsonl is not what notebook 01_build made"),
    ):
        source = (out / file).read_text()
        assert old in source
        (out / file).write_text(source.replace(old, new))
        assert any(words in fault for fault in writeup_faults(out))
        write_writeup(out)  # made again from what was typed over
        assert words in writeup_faults(out)[0]
        (out / file).write_text(source)
        write_writeup(out)
        assert not writeup_faults(out)
    (out / "results" / "losses.json").unlink()
    assert "losses.json is gone: what notebook 01_build made" in writeup_faults(out)[0]
    write_json(out / "results" / "losses.json", {"loss": 1.4})
    seal(out, "02_train")  # which made the table again
    assert not writeup_faults(out)
    notebook = nbformat.read(out / "notebooks" / "02_train.ipynb", as_version=4)
    notebook.cells[0].source = "# 02 Another run"
    nbformat.write(notebook, out / "notebooks" / "02_train.ipynb")
    seal(out, "02_train")
    assert "was made from other notebooks than these" in writeup_faults(out)[0]
    notebook.metadata[SEAL] = ["no hashes"]
    nbformat.write(notebook, out / "notebooks" / "02_train.ipynb")
    assert writeup_faults(out)[0] == "Notebook 02_train has no hashes of its outputs: execute it with `workbook run`."
    seal(out, "02_train")
    write_writeup(out)
    pdf.write_bytes(pdf.read_bytes()[:1000])
    assert "not a sound PDF" in writeup_faults(out)[0]


def test_the_committed_writeup_is_short_and_of_one_execution():
    for machine in (ROOT / "writeup").iterdir():
        files = {handout.name: machine / f"{handout.name}.pdf" for handout in HANDOUTS.values()}
        assert {file.stem for file in machine.glob("*.pdf")} == set(files)
        assert len({pages_and_keywords(file)[1] for file in files.values()}) == 1
        for handout in HANDOUTS.values():
            assert pages_and_keywords(files[handout.name])[0] <= handout.most_pages
            assert files[handout.name].stat().st_size < 1.5e6
        for file in (machine / "notebooks").glob("*.ipynb"):
            notebook = nbformat.read(file, as_version=4)
            assert notebook.metadata[SEAL]["cells"] == cell_hashes(notebook)
            assert file.stat().st_size < 700e3, file.name


def test_what_is_published(tmp_path):
    out, to = executed_workbook(tmp_path, _01_build=FIRST, _02_train=SECOND), tmp_path / "to"
    file = out / "notebooks" / "01_build.ipynb"
    notebook = nbformat.read(file, as_version=4)
    notebook.cells[0].source += "\n\n![A mask](../figures/pictures/causal_mask.svg)"
    injected = {"tags": ["injected-parameters"]}
    notebook.cells.insert(
        1, new_code_cell("out = '/home/someone/runs'\nscale = 'gpu'", metadata=injected, execution_count=1)
    )
    notebook.cells = [each for each in notebook.cells if each.metadata.get("caption") != "A broken picture"]
    notebook.metadata["papermill"] = {"output_path": "/home/someone/x.ipynb"}
    nbformat.write(notebook, file)
    for name in ("01_build", "02_train"):
        seal(out, name)
    for place in (out / "figures" / "loss.svg", to / "figures" / "old.svg"):
        place.parent.mkdir(parents=True)
        place.write_text(SVG)
    assert len(publish.publish(out, to)) == 6
    assert sorted(path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()) == [
        "cs336-a1.pdf", "cse599o-a1-part1.pdf", "cse599o-a1-part2.pdf", "figures/loss.svg",
        "notebooks/01_build.ipynb", "notebooks/02_train.ipynb",
    ]  # fmt: skip
    text = (to / "notebooks" / "01_build.ipynb").read_text()
    for words in ("/home/someone", "svg+xml", "warning!"):
        assert words not in text
    shown = nbformat.reads(text, as_version=4)
    assert shown.metadata[SEAL]["cells"] == cell_hashes(shown)
    pictures = [o for c in shown.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert [base64.b64decode(picture.data["image/png"])[:4] for picture in pictures] == [b"\x89PNG"] * 2
    assert "![A mask](../../../figures/pictures/causal_mask.svg)" in text  # as seen from writeup/h200/notebooks
    assert shown.cells[1].source == "*Executed with other parameters than these defaults:* `scale = 'gpu'`."
    assert "*Figure 1.* Share by $\\\\theta$" in text


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
    assert row in tables.coverage_markdown(found.values())
    assert tables.counts(found.values())["CS336 A2 2026"] == {"done": 0, "partly": 1, "not yet": 26, "problems": 27}


def test_an_answer_for_one_handout_takes_the_place_of_the_one_for_all():
    parts = ("b", "b, CSE599-O", "b, 2026")
    found = covered(*(coverage.Answered("benchmarking_script", part, text=part) for part in parts))
    given = {handout: [a.text for a in p.answers] for (handout, _), p in found.items() if p.answers}
    assert given == {
        "CSE599-O A1 part 2": ["b, CSE599-O"], "CS336 A2 2025": ["b"], "CS336 A2 2026": ["b, 2026"]
    }  # fmt: skip


def test_an_answer_says_what_does_not_hold_what_is_missing_and_what_was_not_measured():
    assert answers.answer("adamw", "- one\n- two").data.startswith("> **Answer — adamw.**\n>\n> - one\n> - two")
    holds = {"it falls": np.array([True, False]), "it is there": True, "it is small": np.nan < 1}
    share, power = math.nan, "$x^{2}$"
    shown = answers.answer(
        "adamw (b)", f"{share:.0%} of nanograms and {share:.3f} s of {power}.", holds, "a share of 1"
    )
    assert shown.data == (
        "> **Answer — adamw (b).** (not measured) of nanograms and (not measured) s of $x^{2}$.\n>\n"
        "> *Missing:* a share of 1.\n>\n> *Does not hold on this machine:* it falls; it is small."
    )
    found = json.loads(json.dumps(shown.metadata[answers.METADATA_KEY]))
    assert (found["problem"], found["part"], found["missing"]) == ("adamw", "b", "a share of 1")
    assert found["holds"] == {"it falls": False, "it is there": True, "it is small": False}
    for problem, text, words in (("adamw", "  ", "empty"), ("(b)", "x", "named like")):
        with pytest.raises(UserError, match=words):
            answers.answer(problem, text)


WORDING = [
    (wording.format_count, 999_999, "1.00 million"),
    (formatting.format_bytes, 999, "999 bytes"),
    (formatting.format_bytes, 999_999, "1.00 MB"),
    (wording.format_seconds, 3.5e-4, "350 µs"),
    (wording.format_seconds, 0.9999, "1.00 s"),
    (wording.format_seconds, 59.96, "1 min"),
    (wording.format_seconds, 18720, "5 h 12 min"),
    (formatting.format_significant, 0.9996, "1.00"),
    (wording.join_words, ["a", "b", "c"], "a, b and c"),
]


@pytest.mark.parametrize(("function", "value", "text"), WORDING)
def test_wording(function, value, text):
    assert function(value) == text
