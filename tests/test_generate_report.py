"""Measures of sampled text against hand counts, and its quotation in Markdown."""

import json
import math

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcore.checkpoint import save_checkpoint, save_weights
from lmcore.config import GenerateConfig, ModelConfig, TrainConfig
from lmcore.data import CorpusConfig, prepare
from lmcore.generate import Generation
from lmcore.model import TransformerLM
from lmcore.optimizer import AdamW
from lmcore.run import RunFolder
from lmcore.tokenizer import END_OF_TEXT, Tokenizer
from lmcore.workbook.report.generate.answers import (
    change,
    decoding_answer,
    generate_answer,
    measures_table,
    quote,
    quote_sample,
    setting_name,
)
from lmcore.workbook.report.generate.measures import (
    Judge,
    KnownText,
    documents_of,
    judge_of,
    log_likelihood,
    measure_settings,
    measure_training,
    models_of,
    records,
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


def test_known_text_knows_its_words_and_trigrams():
    known = KnownText("One two three. Two, three four!")
    assert known.knows_words(["one", "four", "five"]) == [True, True, False]
    assert known.knows_trigrams(["one", "two", "three", "two", "three", "five", "four"]) == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert known.knows_trigrams(["one", "two"]) == []
    assert KnownText("").knows_trigrams(["a", "b", "c"]) == [False]


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcde"), max_size=8))
def test_known_trigrams_are_those_of_the_text(text, sequence):
    there = {tuple(text[i : i + 3]) for i in range(len(text) - 2)}
    expected = [tuple(sequence[i : i + 3]) in there for i in range(len(sequence) - 2)]
    assert KnownText(" ".join(text)).knows_trigrams(sequence) == expected


def test_documents_of_a_corpus():
    ids = [0, 1, EOT, 2, EOT, 0, 0, 0]
    first, second = documents_of(Letters(), ids, count=5, max_tokens=2)
    assert (first.ids, first.text, first.stop) == ([0, 1], "a b ", "max_new_tokens")
    assert (second.ids, second.stop) == ([2], "end_of_text")


def test_the_judge_of_the_embedded_corpus(tmp_path):
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)} | {256: END_OF_TEXT.encode()}, [], [END_OF_TEXT])
    data = prepare("embedded", tokenizer, tmp_path, CorpusConfig(num_documents=20), progress=False)
    judge = judge_of(data)
    (story,) = documents_of(tokenizer, data.valid, 1, 10_000)
    assert judge.accepts(story.text)
    assert not judge.accepts(story.text.replace("a", "e"))
    assert all(judge.known.knows_words(["once", "upon"]))


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
    judge = Judge(Letters(), KnownText("a b a"), accepts=lambda text: text == "b a")
    found = judge.measure(model, samples)
    assert found["known_words"] == pytest.approx(6 / 7)  # the last word of the unfinished one may be cut off
    assert found["known_trigrams"] == pytest.approx(0 / 2)
    assert found["finished"] == pytest.approx(2 / 3)
    assert found["accepted"] == pytest.approx(1 / 2)
    assert found["repetition"] == 0
    assert found["log_likelihood"] < 0
    assert math.isnan(judge.measure(model, samples[1:2])["accepted"])
    assert math.isnan(Judge(Letters(), KnownText("")).measure(model, samples)["accepted"])


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


def test_settings_are_measured_one_by_one(model):
    table = measure_settings(Judge(Letters(), KnownText("a b")), model, [0, 2.0], [0.5, 1.0], 3, GenerateConfig(5))
    assert table[["temperature", "top_p"]].values.tolist() == [[0, 0.5], [0, 1.0], [2.0, 0.5], [2.0, 1.0]]
    # the nucleus makes text likelier; greedy text does not depend on it
    greedy, hot = table[table["temperature"] == 0], table[table["temperature"] == 2.0]
    assert greedy["log_likelihood"].nunique() == 1
    assert hot["log_likelihood"].iloc[0] > hot["log_likelihood"].iloc[1]


def test_records_are_json_without_nan():
    rows = records(pd.DataFrame({"step": [0, 5], "accepted": [math.nan, 0.5]}))
    assert json.loads(json.dumps(rows, allow_nan=False)) == [
        {"step": 0, "accepted": None},
        {"step": 5, "accepted": 0.5},
    ]


def test_the_states_of_a_run(model, tmp_path):
    run = RunFolder(tmp_path / "run")
    config = TrainConfig(model=model.config, seed=7)
    run.begin(config, {})
    torch.manual_seed(7)
    initial = TransformerLM(config.model)
    optimizer = AdamW(model.parameters())
    save_checkpoint(model, optimizer, 10, run.checkpoint_file(10))
    save_weights(model, run.best_weights, step=10)
    before = torch.get_rng_state()
    models = models_of(run, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(models) == [0, 10]
    assert torch.equal(models[0].lm_head.weight, initial.lm_head.weight)
    assert torch.equal(models[10].lm_head.weight, model.lm_head.weight)
    table = measure_training(Judge(Letters(), KnownText("a b c")), run, 4, GenerateConfig(6), torch.device("cpu"))
    assert table["step"].tolist() == [0, 10]


def table(**columns) -> pd.DataFrame:
    rows = max(len(values) for values in columns.values())
    other = {
        "repetition": [0.1] * rows,
        "finished": [1.0] * rows,
        "accepted": [math.nan] * rows,
        "known_trigrams": [0.5] * rows,
    }
    return pd.DataFrame(other | columns)


REFERENCE = {
    "log_likelihood": -1.5,
    "repetition": 0.02,
    "known_words": 0.99,
    "known_trigrams": 0.8,
    "finished": 1.0,
    "accepted": math.nan,
}


def test_the_answer_says_what_was_measured():
    settings = table(
        temperature=[0.0, 0.5, 0.5, 1.2, 1.2],
        top_p=[1.0, 0.9, 1.0, 0.9, 1.0],
        log_likelihood=[-0.2, -0.5, -0.6, -1.9, -2.5],
        known_words=[1.0, 0.98, 0.97, 0.88, 0.71],
    )
    training = table(step=[0, 100], log_likelihood=[-9.0, -1.0], known_words=[0.2, 0.97])
    chosen = training.iloc[1].to_dict()
    text = generate_answer(chosen, GenerateConfig(temperature=0.7, top_p=0.9), settings, training, REFERENCE)
    fluency, temperature, top_p, steps = text.split("\n\n")
    assert "(temperature 0.7, top-p 0.9)" in fluency
    assert "Most of its words occur in the corpus (97.0%; held-out text 99.0%)" in fluency
    assert "repeats itself more than" in fluency
    assert "grammar" not in text
    assert "trigrams" not in text  # their share is the same everywhere
    assert "From 0.5 to 1.2 (top-p 1)" in temperature
    assert "falls from 97.0% to 71.0%" in temperature
    assert "(−1.50) lies in between" in temperature
    assert "from 1 to 0.9: the share of words that occur in the corpus rises from 71.0% to 88.0%" in top_p
    assert "From step 0 to step 100" in steps
    assert "log-likelihood per token rises from −9.00 to −1.00" in steps


@pytest.mark.parametrize(
    ("before", "after", "words_"),
    [
        (0.5, 0.25, "falls from 50.0% to 25.0%"),
        (0.5, 0.50001, "stays at 50.0%"),
        (math.nan, 0.25, "is – before and 25.0% after"),
    ],
)
def test_changes_are_worded_by_their_direction(before, after, words_):
    assert words_ in change("accepted", before, after)


def test_tables_leave_out_what_could_not_be_measured():
    lines = measures_table(table(step=[0, 5], known_words=[0.5, 1.0]), REFERENCE).split("\n")
    assert "grammar" not in lines[0]
    assert "words of the corpus" in lines[0]
    assert [cell.strip() for cell in lines[-1].split("|")][1] == "held-out text"
    assert "99.0%" in lines[-1]


def test_samples_are_quoted_under_their_settings():
    sample = Generation("Once", " upon", [1, 2], "end_of_text")
    assert quote_sample(sample, GenerateConfig(temperature=0)) == (
        "**greedy (temperature 0) — 2 tokens, ended by itself**\n\n> Once upon"
    )
    assert setting_name(GenerateConfig(temperature=0.5, top_p=0.9, top_k=3)) == "temperature 0.5, top-p 0.9, top-k 3"


def test_the_decoding_answer_counts():
    assert "12 of 12 rows" in decoding_answer(12, 12, 1000, 100)
    assert "100 positions instead of 1,000 (10.0 times fewer)" in decoding_answer(12, 12, 1000, 100)
