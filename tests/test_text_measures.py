"""The measures of text and their intervals, which stand in cells of notebook 03."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from notebook_cells import PROJECT

from lmcore.config import ModelConfig
from workbook.notebook import read_notebook

MEASURES = ["02", "words", "repetition", "known", "halves", "names", "halves-known", "likelihood", "bootstrap"]
MEASURES += ["difference", "bootstrap-known"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """What the cells define. Those of known cases hold assertions of their own."""
    sources = {cell.id: cell.source for cell in read_notebook(PROJECT / "notebooks" / "03_generate.ipynb").cells}
    parameters = {"out": str(tmp_path_factory.mktemp("out")), "scale": "smoke", "records": ""}
    variables = parameters | {"__name__": "__main__"}
    for name in MEASURES:
        exec(compile(sources[f"generate-{name}"], name, "exec"), variables)
    return variables


def test_halves_join_to_the_story_and_are_cut_after_a_sentence_past_the_middle(cells):
    story = 'Tim ran. "Stop!" said Ann, who was near. "Who was it?" Yes.\n\nHe slept. '
    first, second = cells["halves"](story)
    assert first + second == story
    assert len(first) >= len(story) / 2
    assert first.endswith("near.")
    assert cells["halves"]("") is None
    assert cells["names_kept"]("Tim ran. ", "Tim and Tim met Ann, and the Dog of Tim's.", {"Tim", "Ann"}) == 3 / 4


def test_distinct_is_of_stories_together_and_of_one_length(cells):
    two = [cells["words_of"](story) for story in ("a big red dog ran", "a big red cat")]
    assert [cells["distinct"](two, n, 4) for n in (1, 2, 3)] == pytest.approx([5 / 8, 4 / 6, 3 / 4])
    assert cells["distinct"]([two[0]] * 2, 1, 5) == 0.5
    assert np.isnan(cells["distinct"](two, 1, 5))  # one is too short


class Echo(torch.nn.Module):
    """Of three tokens, those seen k times have a probability of (k + 1) / (n + 3) after n tokens."""

    config = ModelConfig(3, context_length=16, d_model=4, num_layers=1, num_heads=1, d_ff=4)

    def forward(self, ids):
        seen = torch.nn.functional.one_hot(ids, 3).cumsum(1) + 1.0
        return (seen / seen.sum(-1, keepdim=True)).log()


def test_likelihoods_are_those_of_a_model_whose_probabilities_can_be_counted(cells):
    letters = SimpleNamespace(eot_id=0, encode=lambda text: ["<ab".index(letter) for letter in text])
    model, log_likelihoods = Echo().to(cells["device"]), cells["log_likelihoods"]
    found = log_likelihoods(model, letters, [("aaaa", "aa"), ("bbb", "aa"), ("bbbb", "aa")])
    by_hand = [np.log([5 / 8, 6 / 9]).mean(), np.log([1 / 7, 2 / 8]).mean(), np.log([1 / 8, 2 / 9]).mean()]
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)
    last = log_likelihoods(model, letters, [("aaaa", "aa"), ("", "a")], skip=1)
    np.testing.assert_allclose(last, [np.log(6 / 9), np.nan], rtol=1e-5)  # without its first token; none is left


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
