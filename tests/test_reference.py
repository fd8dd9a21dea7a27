"""The committed results, and what the README and the committed figures make of them."""

import json
import re
from pathlib import Path

import pytest

from lmcore.errors import UserError
from lmcore.workbook.report.reference import FAULTS, block, results_block, write_readme, write_reference_figures
from lmcore.workbook.report.speed import speed_block
from lmcore.workbook.report.survival import faults_block

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "results" / "h200"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results", lambda: results_block(RESULTS)),
        ("speed", lambda: speed_block(RESULTS)),
        ("faults", lambda: faults_block(PROJECT / FAULTS)),
    ],
)
def test_the_readme_says_what_the_results_hold(name, text):
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert block(name).search(readme)[0] == text()


def test_kinds_of_faults_are_counted_together(tmp_path):
    kinds = ["metrics damaged", "metrics of a complete run damaged", "lightning", "SIGKILL just before a rename"]
    rows = [{"kind": kind, "tried": 3, "survived": 2, "refused_in_words": 1, "lost": 0} for kind in kinds]
    report = {"provenance": {"torch": "2", "git_commit": "abc"}, "faults": rows}
    (tmp_path / "faults.json").write_text(json.dumps(report))
    text = faults_block(tmp_path / "faults.json")
    assert text.startswith("12 faults were tried on training runs: 8 survived, 4 refused, 0 lost.")
    cells = [[word.strip() for word in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][
        1:
    ]
    assert cells == [
        ["metrics damaged", "6", "4", "2", "0"],
        ["lightning", "3", "2", "1", "0"],
        ["SIGKILL at every kind of file operation of a save", "3", "2", "1", "0"],
    ]


def test_a_report_that_is_none_is_refused(tmp_path):
    (tmp_path / "faults.json").write_text('{"faults": [{"kind": "kill"}]}')
    with pytest.raises(UserError, match="is not a report of the fault suite"):
        faults_block(tmp_path / "faults.json")


def test_pictures_and_links_of_the_readme_exist():

    targets = re.findall(r"\]\(([^)#]+)\)", (PROJECT / "README.md").read_text(encoding="utf-8"))
    assert any(target.endswith(".svg") for target in targets)
    assert [target for target in targets if not (PROJECT / target).exists()] == []


def test_the_committed_figures_are_drawn_from_the_committed_results(tmp_path):
    made = {path.name: path for path in write_reference_figures(RESULTS, tmp_path)}
    committed = {path.name for path in (PROJECT / "figures" / "h200").iterdir()}
    assert made.keys() == {name for name in committed if not name.startswith(("kernels_", "speed_"))}  # notebook 07's
    assert all(path.stat().st_size > 5000 for path in made.values())


def test_a_readme_without_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(UserError, match="lacks the markers"):
        write_readme(tmp_path / "README.md", {"faults": "text"})
