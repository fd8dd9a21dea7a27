"""A course of hand-ins, most of them tampered with: each is named in a sentence, the honest ones have their marks."""

import contextlib
import json
import re
import shutil
import stat
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from nbformat.v4 import new_markdown_cell
from notebook_projects import SVG, code, make_project

from workbook import cli
from workbook.grading.grade import grade_course
from workbook.grading.limits import Limits
from workbook.handin import MANIFEST, handin
from workbook.notebook import INJECTED, read_notebook, tags, write_notebook
from workbook.record import read_record, source_hash, write_record
from workbook.report.writeup import write_writeup
from workbook.seal import seal

NAME, HANDOUT, ASKED = "02_toy", "cse599o-a1-part2", "Run Training Loop"

PARAMETERS = 'scale = "smoke"\ndata = "embedded"\nout = "../runs/smoke"\nrecords = ""\nsteps = 6'

SOFTMAX = """import torch

def softmax(x, dim):
    ### BEGIN SOLUTION
    x = x - x.amax(dim, keepdim=True)
    return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)
    ### END SOLUTION"""

PERPLEXITY = """import math

def perplexity(loss):
    ### BEGIN SOLUTION
    return math.exp(loss)
    ### END SOLUTION"""

UNSOLVED = ("linear", "embedding", "cross_entropy", "merge_pair", "decode", "encode_word")
"""Exercises that are stubs here; a hand-in of cheats replaces them."""

RUN = """from lmcore.config import ModelConfig, OptimizerConfig, TrainConfig
from lmcore.data.corpora import CorpusConfig
from lmcore.data.prepared import prepare
from lmcore.run import RunFolder
from lmcore.train import train
if not records:
    prepare("embedded", "bpe:300", f"{out}/data", CorpusConfig(num_documents=50), progress=False)
    model = ModelConfig(vocab_size=300, context_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32)
    config = TrainConfig(model=model, optimizer=OptimizerConfig(warmup_steps=1), data=f"{out}/data", batch_size=2,
                         steps=steps, log_interval=1, eval_interval=3, checkpoint_interval=2, keep_checkpoints=3)
    train(config, f"{out}/runs/toy")"""

TABLE = """from workbook.report.results import Results
run = RunFolder(f"{out}/runs/toy")
losses = Results(out, records).table(
    "losses", lambda: run.metrics()[["step", "train_loss"]], made_from=[run.metrics_file])
from workbook.report import tables
tables.table_of_runs(Results(out, records), "toy_runs", tables.run_table, {"toy": run})"""

ANSWER = """from workbook.report.answers import answer
answer("Run Training Loop", f"The loss is {losses['train_loss'].iloc[-1]:.4f} at the end.")"""


def cell(name, source, *tags):
    made = code(source, *tags)
    made.id = name
    return made


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A project whose notebook was executed, and its hand-in."""
    cells = [
        new_markdown_cell("# 02 Toy"), cell("parameters", PARAMETERS, "parameters"),
        cell("softmax", SOFTMAX, "exercise"),
        cell("softmax-check", 'from workbook.exercises import check\nsoftmax = check("softmax", softmax)', "check"),
        cell("perplexity", PERPLEXITY, "exercise"),
        cell("perplexity-check", 'perplexity = check("perplexity", perplexity)', "check"),
        *(each for name in UNSOLVED for each in (
            cell(name, f"def {name}(*arguments):\n    raise NotImplementedError", "exercise"),
            cell(f"{name}-check", f'{name} = check("{name}", {name})', "check"),
        )),
        cell("run", RUN), cell("table", TABLE), cell("picture", SVG), cell("answer", ANSWER),
    ]  # fmt: skip
    folder = make_project(tmp_path_factory.mktemp("course") / "project", _02_toy=cells)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["run"]) == 0
    return folder


class HandIn:
    """One student's copy of the executed workbook, to be changed and handed in."""

    def __init__(self, project: Path, folder: Path):
        self.project, self.folder = folder / "project", folder
        shutil.copytree(project, self.project)
        self.out = self.project / "runs" / "smoke"
        self.file = self.out / "notebooks" / f"{NAME}.ipynb"

    def edit(self, change):
        """Changes the executed notebook by `change`, given its cells by id."""
        notebook = read_notebook(self.file)
        change({each.id: each for each in notebook.cells})
        write_notebook(self.file, notebook)

    def replace(self, file, old, new):
        """Types over what a file of the output folder says."""
        text = (self.out / file).read_text()
        assert re.search(old, text)
        (self.out / file).write_text(re.sub(old, new, text))

    def seal(self):
        """Makes hashes and PDFs anew, as one would who knows how."""
        record = read_record(self.out, NAME)
        notebook = read_notebook(self.file)
        notebook.cells = [each for each in notebook.cells if INJECTED not in tags(each)]
        write_notebook(self.folder / "plain.ipynb", notebook)
        record.source = source_hash(self.folder / "plain.ipynb")
        write_record(self.out, record)
        seal(self.out, NAME)
        write_writeup(self.out)

    def hand_in(self, to: Path):
        """Hands in what there is, whatever our own checks say."""
        import subprocess

        subprocess.run(["git", "init", "-q", self.project], check=True)
        with contextlib.chdir(self.project):
            handin(self.out, to, HANDOUT, incomplete=True)


def typed_answer(given: HandIn):
    def change(cells):
        (output,) = cells["answer"].outputs
        text = re.sub(r"\d\.\d{4}", "1.2345", json.dumps(output))
        output.update(json.loads(text))

    given.edit(change)


def resealed_answer(given):
    typed_answer(given)
    given.seal()


def typed_table(given):
    given.replace("results/losses.json", r'("step": 6, "train_loss": )[\d.]+', r"\g<1>1.2345")


def resealed_table(given):
    typed_table(given)
    resealed_answer(given)


def typed_metrics(given):
    given.replace("runs/toy/metrics.jsonl", r'("step": 6, .*"train_loss": )[\d.]+', r"\g<1>1.2345")


def resealed_metrics(given):
    typed_metrics(given)
    typed_table(given)
    resealed_answer(given)


def other_picture(given):
    given.edit(lambda cells: cells["picture"].outputs[0].data.update({"image/svg+xml": "<svg/>"}))


def silenced_traceback(given):
    def change(cells):
        cells["table"].source = "raise ValueError('hidden')"

    given.edit(change)
    given.seal()


def gone_cell(given):
    given.edit(lambda cells: cells["run"].update(source="corpus = None"))


CHEATS = {
    "softmax": ("    return x.exp() / x.exp().sum(dim, keepdim=True)", "Large inputs overflow"),
    "linear": ("    from lmcore.model import Linear\n    return x", "The cell has lmcore: write it without"),
    "embedding": ("    return torch.embedding(dim, x)", "calls embedding of a library"),
    "cross_entropy": ("    sys.setprofile(None)\n    return x.sum()", "setprofile"),
    "merge_pair": ("    os._exit(0)", "Its process ended with 0"),
    "decode": ("    try:\n        while True: pass\n    except BaseException: decode(x, dim)", "took longer than"),
    "encode_word": ("    return torch.zeros(10**11)", "raises"),
}
"""Bodies of exercises, and what is said of each; all checks are edited as well."""


def cheats(given):
    def change(cells):
        for name, (body, _) in CHEATS.items():
            cells[name].source = f"import os, sys, torch\ndef {name}(x, dim, *more):\n{body}"
            cells[f"{name}-check"].source = f'print("✓ {name}: right in 3 cases.")'

    given.edit(change)
    given.seal()


def older_pdf(given):
    pdf = given.out / "writeup" / f"{HANDOUT}.pdf"
    kept = pdf.read_bytes()
    given.edit(lambda cells: cells["picture"].metadata.update(caption="Another caption."))
    given.edit(lambda cells: cells["picture"].update(source=SVG + "  # changed"))
    given.seal()
    pdf.write_bytes(kept)


def no_table(given):
    (given.out / "results" / "losses.json").unlink()


def shown_answer(given):
    """The text, and not the metadata that no reader sees."""
    given.edit(lambda cells: cells["answer"].outputs[0].data.update({"text/markdown": "The loss is 1.2345."}))
    given.seal()


def resealed_picture(given):
    other_picture(given)
    given.seal()


def resealed_runs(given):
    given.replace("results/toy_runs.json", r'("final_valid_loss": )[\d.]+', r"\g<1>1.2345")
    given.replace("runs/toy/status.json", r'("valid_loss": )[\d.]+', r"\g<1>1.2345")
    given.seal()


def no_runs(given):
    shutil.rmtree(given.out / "runs")
    typed_table(given)
    resealed_answer(given)


def other_parameters(given):
    given.replace(f"notebooks/{NAME}.json", '"parameters": {', '"parameters": {"steps_": 1, ')
    resealed_answer(given)


TAMPERED = {
    typed_answer: r"cell \d+ is not what was executed",
    resealed_answer: r"Run Training Loop says “.*1\.2345.*”, and its tables give “",
    typed_table: r"losses\.json is not what notebook 02_toy made",
    resealed_table: r"Table losses has 1\.2345 as train_loss in row 6; its runs give",
    typed_metrics: r"metrics\.jsonl is not what notebook 02_toy made",
    resealed_metrics: r"toy: step 6 has train_loss 1\.23[45]; replayed, it is",
    other_picture: r"cell \d+ is not what was executed",
    silenced_traceback: r"02_toy failed at code cell \d+: ValueError: hidden",
    gone_cell: r"is not the one that its record says was executed",
    older_pdf: r"\.pdf was made from other notebooks",
    shown_answer: r"Run Training Loop says “.*1\.2345.*”, and its tables give “",
    resealed_runs: r"Table toy_runs has 1\.2345 as final_valid_loss in row 1; its runs give",
    no_runs: r"Table losses cannot be made again: runs/toy/metrics\.jsonl is not there",
    other_parameters: r"Notebook 02_toy cannot be executed again: .*no parameter|No notebook has a parameter 'steps_'",
    no_table: r"losses\.json is gone",
}
"""What of a hand-in does not fit together."""


def truncated(folder):
    file = folder / "results.zip"
    file.write_bytes(file.read_bytes()[:-2000])


def changed_later(folder, name="results/results/losses.json", content=b"{}"):
    with zipfile.ZipFile(folder / "results.zip") as archive:
        files = {name: archive.read(name) for name in archive.namelist()} | {name: content}
    with zipfile.ZipFile(folder / "results.zip", "w") as archive:
        for each in files:
            if files[each]:
                archive.writestr(each, files[each])


def outside(folder):
    with zipfile.ZipFile(folder / "code.zip", "a") as archive:
        archive.writestr("../../evil.py", "1")


def link(folder):
    entry = zipfile.ZipInfo("code/link")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(folder / "code.zip", "a") as archive:
        archive.writestr(entry, "/etc/passwd")


def bomb(folder):
    with zipfile.ZipFile(folder / "code.zip", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("code/zeros", bytes(600_000_000))


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def no_manifest(folder):
    changed_later(folder, MANIFEST, b"")


ARCHIVES = {
    truncated: r"results\.zip is not a whole archive",
    changed_later: r"losses\.json was changed after the hand-in was made",
    outside: r"code\.zip would write outside of its folder, to '\.\./\.\./evil\.py'",
    link: r"code\.zip holds a link, 'code/link'",
    bomb: r"code\.zip would unpack to 6\d\d MB",
    empty: r"There is no workbook in",
    no_manifest: r"There is no manifest\.json",
}


def test_each_tampered_hand_in_is_named_and_the_others_are_graded(course, tmp_path):
    handins = tmp_path / "handins"
    for change in [*TAMPERED, resealed_picture, cheats]:
        given = HandIn(course, tmp_path / change.__name__)
        change(given)
        given.hand_in(handins / change.__name__)
    HandIn(course, tmp_path / "base").hand_in(handins / "honest")
    for change in ARCHIVES:
        shutil.copytree(handins / "honest", handins / change.__name__)
        change(handins / change.__name__)
    shutil.make_archive(str(handins / "zipped"), "zip", handins / "honest")
    grades = grade_course(handins, tmp_path / "grades", course, HANDOUT, Limits(seconds=40))
    by_name = {grade.student: grade for grade in grades}
    wrong = {}
    for change, words in [*TAMPERED.items(), *ARCHIVES.items()]:
        if not any(re.search(words, fault) for fault in by_name[change.__name__].faults):
            wrong[change.__name__] = by_name[change.__name__].faults
    solved = {grade.student: {row.name: row.score for row in grade.rows} for grade in grades}
    assert not sum(solved[each.__name__][ASKED] for each in (resealed_answer, shown_answer, resealed_table, gone_cell))
    notes = {name: " ".join(by_name[name].notes) for name in ("resealed_picture", "honest")}
    assert "cells 22 show something else" in notes["resealed_picture"]
    assert re.fullmatch(r"toy: \d+ losses after step 4 were replayed\.", notes["honest"])
    rows = {row.name: row for row in by_name["cheats"].rows}
    for name, (_, words) in CHEATS.items():
        if rows[name].score or not re.search(words, rows[name].output):
            wrong[name] = rows[name]
    if not rows["perplexity"].score:
        wrong["perplexity"] = rows["perplexity"]
    for name in ("honest", "zipped"):
        grade = by_name[name]
        same = [fault for fault in grade.faults if "is the very file of" not in fault]
        if same or solved[name] != solved[name] | {"softmax": 1, "perplexity": 1, ASKED: 1}:
            wrong[name] = grade
    assert not wrong
    assert any("is the very file of" in fault for fault in by_name["zipped"].faults)
    scores = pd.read_csv(tmp_path / "grades" / "grades.csv").set_index("student")["score"]
    assert len(scores) == len(TAMPERED) + len(ARCHIVES) + 4
    assert scores["honest"] == scores["zipped"] == 3
    shown = json.loads((tmp_path / "grades" / "cheats.json").read_text())
    assert {test["name"]: test["score"] for test in shown["tests"]} == solved["cheats"]
    assert "Large inputs overflow" in (tmp_path / "grades" / "cheats.md").read_text()
    assert not (tmp_path / "evil.py").exists()
