import ast

import pytest
from notebook_cells import answer_calls, run_cells, typed_numbers

from lmcore.workbook.report.results import PERTURB

REWRITTEN = ["03_generate"]
SEEDS = range(12)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """For each notebook the folder of its results at scale smoke, and its answers."""
    found = {}

    def measure(name):
        if name not in found:
            out = tmp_path_factory.mktemp(name)
            found[name] = out, run_cells(name, out=str(out))
        return found[name]

    return measure


@pytest.mark.parametrize("name", REWRITTEN)
def test_records_give_the_answers_that_were_measured(measured, name, tmp_path):
    out, answers = measured(name)
    assert run_cells(name, out=str(tmp_path), records=str(out / "results")) == answers
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", REWRITTEN)
def test_every_claim_can_fail(measured, name, tmp_path, monkeypatch):
    out, answers = measured(name)
    left = {(problem, claim) for problem, found in answers.items() for claim in found["claims"]}
    assert {problem for problem, _ in left} == answers.keys(), "an answer without a claim"
    for seed in SEEDS:
        monkeypatch.setenv(PERTURB, str(seed))
        changed = run_cells(name, out=str(tmp_path), records=str(out / "results"))
        left -= {
            (problem, claim)
            for problem, found in changed.items()
            for claim, holds in found["claims"].items()
            if not holds
        }
    assert not left


@pytest.mark.parametrize("name", REWRITTEN)
def test_templates_hold_no_numbers(name):
    calls = answer_calls(name)
    assert calls
    for call in calls:
        template = ast.literal_eval(call.args[1])
        assert typed_numbers(template) == [], template
        assert any(keyword.arg == "claims" for keyword in call.keywords), template
