"""The measures of text and their intervals, which stand in cells of notebook 03."""

import numpy as np
import pandas as pd
import pytest
from notebook_cells import PROJECT

from lmcore.config import GenerateConfig
from workbook.notebook import read_notebook

MEASURES = ["02", "words", "known", "halves", "halves-known", "likelihood", "likelihood-known", "bootstrap"]
MEASURES += ["bootstrap-known"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """What the cells define. Those of known cases hold assertions of their own."""
    sources = {cell.id: cell.source for cell in read_notebook(PROJECT / "notebooks" / "03_generate.ipynb").cells}
    parameters = {"out": str(tmp_path_factory.mktemp("out")), "scale": "smoke", "records": ""}
    parameters |= {"max_new_tokens": 8, "temperature": 0.8, "top_p": 0.9}
    variables = parameters | {"__name__": "__main__"}
    for name in MEASURES:
        exec(compile(sources[f"generate-{name}"], name, "exec"), variables)
    assert variables["chosen"] == GenerateConfig(max_new_tokens=8, temperature=0.8, top_p=0.9)
    return variables


def test_halves_join_to_the_story_and_are_cut_after_a_sentence_past_the_middle(cells):
    story = 'Tim ran. "Stop!" said Ann, who was near. "Who was it?" Yes.\n\nHe slept. '
    first, second = cells["halves"](story)
    assert first + second == story
    assert len(first) >= len(story) / 2
    assert first.endswith("near.")
    assert cells["halves"]("") is None
    assert cells["names_kept"]("Tim ran. ", "Tim and Tim met Ann, and the Dog of Tim's.", {"Tim", "Ann"}) == 3 / 4


def test_intervals_of_clustered_values_cover_their_mean(cells):
    """Prompts that differ, and seeds: nearly 95 of 100 intervals hold the mean, as few prompts make them narrow."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        _, low, high = cells["interval"](random.normal(size=(12, 1)) + random.normal(size=(12, 6)), draws=400)
        covered += low <= 0 <= high
    assert 86 <= covered <= 99


def test_missing_values_are_left_out(cells):
    values = np.array([[1.0, np.nan], [1.0, 1.0]])
    assert cells["interval"](values) == [1, 1, 1]
    assert np.isnan(cells["interval"](np.full((2, 2), np.nan))).all()
    assert np.isnan(cells["interval"](np.empty((0, 0)))).all()


def test_a_difference_is_of_the_same_prompt_and_sample_in_any_order(cells):
    rows = pd.DataFrame({"prompt": list("aabb"), "sample": list("0101"), "x": [1.0, 20.0, 300.0, 4000.0]})
    other = rows.assign(x=rows["x"] - 0.5).sample(frac=1, random_state=0)
    assert cells["difference"](rows, other, "x") == [0.5, 0.5, 0.5]
    greedy = rows.iloc[[0, 2]].assign(x=[1.0, 300.0])  # one story of a prompt stands beside each of the other's
    assert cells["difference"](rows, greedy, "x")[0] == pytest.approx((0 + 19 + 0 + 3700) / 4)
    assert np.isnan(cells["difference"](rows, rows.iloc[:0], "x")).all()
