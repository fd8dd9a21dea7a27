from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lmcore.errors import UserError
from workbook.report.results import Results, read_results

RECORDS = Path(__file__).parents[1] / "results" / "h200"
MEASURED = pd.DataFrame({"size": ["small", "large"], "learning_rate": [1e-3, 1e-2], "seconds": [0.5, 2.0]})


def measured():
    return MEASURED


def refuse():
    raise AssertionError("nothing is measured where there are records")


def test_a_measured_table_is_written_with_its_provenance(tmp_path):
    table = Results(tmp_path).table("steps", measured)
    pd.testing.assert_frame_equal(table, MEASURED)
    read, provenance, _ = read_results(tmp_path / "results" / "steps.json")
    pd.testing.assert_frame_equal(read, MEASURED)
    assert provenance["device"]
    assert provenance["torch"]


def test_a_measurement_may_bring_its_own_provenance(tmp_path):
    Results(tmp_path).table("steps", lambda: (MEASURED, {"device": "Test chip"}))
    assert read_results(tmp_path / "results" / "steps.json")[1] == {"device": "Test chip"}


def test_records_are_read_and_not_measured(tmp_path):
    Results(tmp_path / "there").table("steps", lambda: (MEASURED, {"device": "Test chip"}))
    here = Results(tmp_path / "here", tmp_path / "there" / "results")
    pd.testing.assert_frame_equal(here.table("steps", refuse), MEASURED)
    files = [tmp_path / place / "results" / "steps.json" for place in ("here", "there")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_table_that_the_records_lack(tmp_path):
    with pytest.raises(UserError, match="have no table steps"):
        Results(tmp_path, tmp_path).table("steps", refuse)


def test_rows_of_several_commits_are_told_where_they_are_read(tmp_path, monkeypatch):
    commits = {"git_commit": ["0123456789abcdef", "fedcba9876543210"]}
    Results(tmp_path / "there").table("steps", lambda: (MEASURED, commits))
    told = []
    monkeypatch.setattr("workbook.report.results.display", told.append)
    Results(tmp_path / "here", tmp_path / "there" / "results").table("steps", refuse)
    (shown,) = told
    assert shown.data == "> The rows of `steps` were measured at the commits 01234567 and fedcba98."


def test_losses_of_students_and_of_their_ensemble_follow_from_their_probabilities():
    codes = np.load(RECORDS / "training_probabilities.npz")
    nats = {name: (codes[name] / 32.0) ** 2 for name in codes}
    losses = read_results(RECORDS / "training_runs.json")[0].set_index("name")["final_valid_loss"]
    assert {*nats} == {name for name in losses.index if name.startswith("taught")}
    for name, found in nats.items():
        assert found.mean() == pytest.approx(losses[name], abs=2e-4)
    together = -np.log(np.mean([np.exp(-found) for found in nats.values()], axis=0)).mean()
    assert read_results(RECORDS / "training_ensemble.json")[0]["loss"].item() == pytest.approx(together, abs=2e-4)
