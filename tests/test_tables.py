import json
import math

import numpy as np
import pandas as pd
import pytest
from notebook_cells import RECORDS

from lmcore.config import TrainConfig, model_config
from lmcore.data import open_data
from lmcore.errors import UserError
from lmcore.run import RunFolder
from workbook.report import results, tables


def make_run(folder, losses, state="complete", *, valid=None, batch_size=4, **notes) -> RunFolder:
    """A run folder with one metrics line for each loss, the last one with a validation loss."""
    config = TrainConfig(
        model=model_config("smoke"), batch_size=batch_size, steps=10 * max(len(losses), 1), teacher="a/b"
    )
    run = RunFolder(folder)
    with run.lock():
        run.begin(config, {"device": "Test chip", "torch": "2.0", "data_fingerprint": "f" * 64})
    for number, loss in enumerate(losses, 1):
        line = {"step": 10 * number, "tokens": 10 * number * config.tokens_per_step, "seconds": float(number)}
        line |= {"train_loss": loss, "lr": 1e-3, "grad_norm": 1.0, "peak_memory_bytes": 1000 * number}
        line["tokens_per_second"] = [1.0, 100.0, 300.0, 200.0][(number - 1) % 4]
        if valid is not None and number in valid:
            line["valid_loss"] = valid[number]
        run.append_metrics(line)
    last = valid[max(valid)] if valid else None
    run.write_status(state, 10 * len(losses), valid_loss=last, seconds=float(len(losses)), **notes)
    return run


def row_of(run: RunFolder) -> dict:
    return tables.run_table({"run": run}).iloc[0].to_dict()


def test_a_complete_run(tmp_path):
    row = row_of(make_run(tmp_path, [6.0, 4.0, 4.3, 3.0], valid={2: 3.5, 3: 3.1, 4: 3.2}))
    expected = {
        "outcome": "complete", "final_valid_loss": 3.2, "best_valid_loss": 3.1, "steps": 40,
        "tokens": 40 * 4 * 256, "tokens_per_second": 200,  # the median without the first line, which held the warm-up
        "peak_memory_bytes": 2000, "seconds": 4.0, "device": "Test chip", "batch_size": 4, "diverged_at_step": None,
        "num_layers": 2, "teacher": "b",
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert row["max_spike"] == pytest.approx(0.3)


NOISE = (4 + np.random.default_rng(0).normal(0, 0.6, 3000)).tolist()
END = [6.0, 5.0, 4.0, 3.9, 3.8]
OUTCOMES = {  # losses; outcome, and where it diverged. A uniform guess has the loss ln(10,000) = 9.21.
    "lost what it had learned": ([6.0, 4.5, 4.4, 4.6, 4.5, 5.4, 5.5, 5.6, 5.3, 5.2], "diverged", 30),  # lowest median
    "one hard batch at the end": ([6.0, 4.5, 4.4, 4.3, 4.2, 5.9], "complete", None),
    "noise": (NOISE, "complete", None),
    "only too short": ([6.2, 6.1, 6.15], "complete", None),
    "recovered from worse than a guess": ([9.3, 6.0, 9.7, 9.8, 155.0, 4.9, 4.8, 4.0, 3.9, 3.8], "diverged", 40),
    "just not worse than a guess": ([9.3, 6.0, 9.7, *END], "complete", None),
    "worse than a guess before it learns": ([30.0, 12.0, 9.3, *END], "complete", None),
}


@pytest.mark.parametrize(("losses", "outcome", "step"), OUTCOMES.values(), ids=OUTCOMES)
def test_which_runs_have_diverged(tmp_path, losses, outcome, step):
    row = row_of(make_run(tmp_path, losses, valid={len(losses): losses[-1]}))
    assert (row["outcome"], row["diverged_at_step"], row["best_valid_loss"]) == (outcome, step, losses[-1])
    assert row["final_valid_loss"] == (losses[-1] if outcome == "complete" else None)


def test_a_loss_that_was_not_finite(tmp_path):
    row = row_of(make_run(tmp_path, [6.0, 9.0], "diverged", valid={1: 5.9}, diverged_at_step=23))
    assert (row["outcome"], row["diverged_at_step"], row["final_valid_loss"]) == ("diverged", 23, None)


@pytest.mark.parametrize("name", ["sweep", "training", "experiment", "experiment_rate"])
def test_no_committed_run_that_is_complete_rose_above_a_uniform_guess(name):
    """A rise of more than ln(50,257) + 0.5 nats ends above it, whatever the run had reached."""
    rows = results.read_results(RECORDS / f"{name}_runs.json")[0]
    assert rows[rows["outcome"] == "complete"]["max_spike"].max() < 10.82 + 0.5
    assert rows["name"].is_unique


@pytest.mark.parametrize("state", ["out of memory", "running"])
def test_a_run_without_a_line(tmp_path, state):
    row = row_of(make_run(tmp_path, [], state))
    assert row["outcome"] == ("interrupted" if state == "running" else state)
    assert row["final_valid_loss"] is row["max_spike"] is row["tokens_per_second"] is row["peak_memory_bytes"] is None


def test_unigram_entropy_of_the_training_tokens(embedded_data, monkeypatch):
    data = open_data(embedded_data)
    shares = pd.Series(data.train).value_counts(normalize=True)
    monkeypatch.setattr(tables, "COUNT_CHUNK", 1000)  # several pieces
    assert tables.unigram_entropy(data) == pytest.approx(-sum(p * math.log(p) for p in shares))


def test_curves_keep_few_lines_but_every_evaluation(tmp_path):
    losses = [5 - 0.01 * i for i in range(100)]
    runs = {"long": make_run(tmp_path / "long", losses, valid={7: 4.0, 100: 3.9}), "none": make_run(tmp_path, [])}
    curves = tables.curves_table(runs, points=10)
    assert set(curves["name"]) == {"long"}
    assert curves["step"].tolist() == [10, 70, 110, 210, 310, 410, 510, 610, 710, 810, 910, 1000]
    assert curves["valid_loss"].dropna().tolist() == [4.0, 3.9]
    assert tables.curves_table({"none": runs["none"]}).empty


def test_runs_are_read_as_they_were_written_and_their_provenance_lists_what_differs(tmp_path):
    runs = {
        "good": make_run(tmp_path / "good", [6.0, 3.0], valid={2: 3.25}),
        "memory": make_run(tmp_path / "memory", [], "out of memory"),
    }
    environment = runs["memory"].environment()
    changes = {"data_fingerprint": "0" * 64, "data": {"request": "another"}, "device": "Other chip"}
    runs["memory"].environment_file.write_text(json.dumps([environment | changes]))
    path = tmp_path / "results" / "runs.json"
    written = results.write_results(tables.run_table(runs), path, tables.provenance_of(runs), floor=float(1))
    table, provenance, notes = results.read_results(path)
    pd.testing.assert_frame_equal(table, written, check_dtype=False)
    assert notes == {"floor": 1.0}
    assert provenance["device"] == ["Test chip", "Other chip"]
    assert provenance["data_fingerprint"] == ["f" * 64, "0" * 64]
    assert [corpus["request"] for corpus in provenance["data"]] == [None, "another"]
    assert (provenance["runs"], provenance["torch"]) == (2, "2.0")
    assert "NaN" not in path.read_text()
    path.write_text("[1]")
    with pytest.raises(UserError, match="not a results file"):
        results.read_results(path)
