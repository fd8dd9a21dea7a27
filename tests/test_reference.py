"""The committed results, and the tables that pages make of them."""

import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT / "results"))
import tables  # noqa: E402 - a script beside the results


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_pages_say_what_the_results_hold(page):
    assert (PROJECT / page).read_text(encoding="utf-8") == tables.with_tables(page)


def test_kinds_of_faults_are_counted_together():
    counts = tables.fault_counts()
    assert set(counts["fault"]) == set(tables.FAULTS)  # no kind is left over
    assert (counts["tried"] == counts["survived"] + counts["refused"] + counts["lost"]).all()


def test_a_target_is_judged_by_what_was_measured():
    recorded = tables.read_json(tables.SPEED)
    rows = tables.rows_table(recorded["rows"])
    said = [tables.verdict(target, rows) for target in recorded["targets"][:4]]
    assert [re.search(r"deciles|yes$|\*\*no", words)[0] for words in said] == ["deciles", "**no", "**no", "yes"]


@pytest.mark.parametrize("page", [*tables.PAGES, "CONTRIBUTING.md", "papermill_jobs/README.md"])
def test_pictures_and_links_of_the_pages_exist(page):
    targets = re.findall(r"\]\(([^)#]+)\)", (PROJECT / page).read_text(encoding="utf-8"))
    files = [target for target in targets if "://" not in target]
    assert [target for target in files if not ((PROJECT / page).parent / target).exists()] == []


def test_the_readme_is_short():
    assert len((PROJECT / "README.md").read_text(encoding="utf-8").split()) <= 900
