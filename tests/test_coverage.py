"""The table of the handouts' problems."""

from pathlib import Path

from lmcore.workbook.report.coverage import answers_in, counts, coverage, page

PROJECT = Path(__file__).parents[1]


def test_the_committed_page_is_what_the_notebooks_answer():
    made = page(coverage(answers_in(sorted((PROJECT / "notebooks").glob("*.ipynb")))))
    assert (PROJECT / "docs" / "coverage.md").read_text(encoding="utf-8") == made


def test_parts_and_handouts_are_told_apart():
    answers = {"transformer_accounting (a)": ["01"], "linear": ["01"], "memory_profiling (c, CSE599-O)": ["06"]}
    table = coverage(answers).set_index(["handout", "problem"])["answered"]
    assert table["CSE599-O A1 part 1", "transformer_accounting"] == "a of a, b, c, d, e"
    assert table["CS336 A1 2026", "linear"] == "yes"
    assert table["CS336 A1 2026", "embedding"] == "not yet"
    assert table["CSE599-O A1 part 2", "memory_profiling"] == "c of a, b, c"
    assert table["CS336 A2 2025", "memory_profiling"] == "not yet"
    assert counts(coverage(answers)).set_index("handout")["answered"]["CSE599-O A1 part 1"] == 1
