"""Measures of sampled text against hand counts, and its quotation in Markdown."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcore.config import ModelConfig
from lmcore.generate import Generation
from lmcore.model import TransformerLM
from lmcore.report.generation import (
    documents_of,
    known_words,
    log_likelihood,
    measure,
    quote,
    repetition,
    words,
)

EOT = 3


class Letters:
    """Tokens "a ", "b ", "c " and <|endoftext|>."""

    vocab_size, eot_id = 4, EOT

    def encode(self, text: str) -> list[int]:
        return ["abc".index(letter) for letter in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "".join(("a ", "b ", "c ", "<|endoftext|>")[i] for i in ids)


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(ModelConfig(4, context_length=6, d_model=8, num_layers=1, num_heads=2, d_ff=8))


def test_words_and_repetition():
    assert words("Don't stop, Tim's dog! 42 été") == ["don't", "stop", "tim's", "dog", "été"]
    assert repetition("a b c d e") == 0
    assert repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert repetition("A a a a a a", n=2) == pytest.approx(4 / 5)
    assert math.isnan(repetition("too short"))


def test_known_words_and_documents():
    ids = [0, 1, EOT, 2, EOT, 0, 0, 0]
    assert known_words(Letters(), ids, max_tokens=2) == {"a", "b"}
    first, second = documents_of(Letters(), ids, count=5, max_tokens=2)
    assert (first.ids, first.text, first.stop) == ([0, 1], "a b ", "max_new_tokens")
    assert (second.ids, second.stop) == ([2], "end_of_text")


def test_log_likelihood_is_that_of_the_context(model):
    rows = [[0, 1, 2], [2] * 20, []]
    total = count = 0
    for row in rows:
        ids = [EOT, *row]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:6]]))[0].log_softmax(-1)
        for position, token in enumerate(ids[1:7]):
            total += logits[position, token].item()
            count += 1
    assert log_likelihood(model, rows, EOT) == pytest.approx(total / count, rel=1e-5)
    assert math.isnan(log_likelihood(model, [[]], EOT))


def test_measures_are_means_over_the_samples(model):
    samples = [
        Generation("", "a a b x", [0, 0, 1, 2], "end_of_text"),
        Generation("", "a cu", [0, 2], "max_new_tokens"),
        Generation("", "b a", [1, 0], "end_of_text"),
    ]
    found = measure(model, Letters(), samples, frozenset("ab"), accepts=lambda text: text == "b a")
    assert found["known_words"] == pytest.approx(6 / 7)  # the last word of the unfinished one may be cut off
    assert found["finished"] == pytest.approx(2 / 3)
    assert found["accepted"] == pytest.approx(1 / 2)
    assert found["repetition"] == 0
    assert found["log_likelihood"] < 0
    assert math.isnan(measure(model, Letters(), samples[1:2], frozenset(), lambda text: True)["accepted"])


def test_a_quotation_cannot_be_read_as_markup():
    text = 'Hi *you* <|endoftext|> "so"... \\textbf{x} $x$ &amp; [a](b)\nline\n\n# head\x00\t'
    shown = quote(text, "heading")
    assert shown.startswith("**heading**\n\n> Hi ")
    assert all(line.startswith(">") for line in shown.split("\n")[2:])
    pypandoc = pytest.importorskip("pypandoc")
    plain = pypandoc.convert_text(shown, "plain", format="markdown", extra_args=["--wrap=none"])
    assert "\n".join(line[2:] for line in plain.rstrip().split("\n")[2:]) == (
        'Hi *you* <|endoftext|> "so"... \\textbf{x} $x$ &amp; [a](b)\nline\n\n# head\\x00\\t'
    )


@given(st.text(max_size=40))
def test_every_line_of_a_quotation_is_quoted(text):
    assert all(line.startswith(">") for line in quote(text, "h").split("\n")[2:])
