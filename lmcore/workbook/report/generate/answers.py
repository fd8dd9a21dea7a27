"""Samples, tables and sentences of notebook 03: what the decoder does, how fluent its text is, and what decides it."""

import math
import re
from collections.abc import Mapping, Sequence

import pandas as pd

from lmcore.config import GenerateConfig
from lmcore.generate import Generation
from lmcore.workbook.report.answers import format_significant, join_words

MEASURES = {
    "log_likelihood": "log-likelihood (nats/token)",
    "repetition": "repeated 4-grams",
    "known_words": "words of the corpus",
    "known_trigrams": "trigrams of the corpus",
    "finished": "documents that end",
    "accepted": "documents the grammar accepts",
}
"""Measures of `lmcore.workbook.report.generate.measures` for readers."""

FLUENT, HALTING = 0.98, 0.9
"""Shares of words that occur in the corpus from which it is nearly all, and most, of them."""

ALIKE = 0.02
"""Difference of two shares of repeated 4-grams that is not spoken of."""

MARKUP = re.compile(r"""[\\`*_{}\[\]()#+.!|~$^>:=@'"<&-]""")


def quote(text: str, heading: str) -> str:
    """Sampled text under a heading as a Markdown block quote, with all that could be read as markup escaped."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    escaped = MARKUP.sub(lambda match: f"&#{ord(match[0])};", shown)
    paragraphs = [re.sub(r" *\n *", "\\\\\n> ", part.strip()) for part in re.split(r"\n\s*\n", escaped) if part.strip()]
    return f"**{heading}**\n\n> " + "\n>\n> ".join(paragraphs or ["&nbsp;"])


def setting_name(config: GenerateConfig) -> str:
    """Decoder settings in words: temperature 0.8, top-p 0.9."""
    names = ["greedy (temperature 0)" if config.temperature == 0 else f"temperature {config.temperature:g}"]
    names += [f"top-p {config.top_p:g}"] if config.top_p < 1 else []
    names += [f"top-k {config.top_k}"] if config.top_k is not None else []
    return ", ".join(names)


def quote_sample(sample: Generation, config: GenerateConfig) -> str:
    """A sample as a block quote, prompt included, under its settings, length and the reason it ended."""
    ending = "ended by itself" if sample.stop == "end_of_text" else "cut off there"
    return quote(sample.prompt + sample.text, f"{setting_name(config)} — {len(sample.ids)} tokens, {ending}")


def measures_table(table: pd.DataFrame, reference: Mapping[str, float] | None = None) -> str:
    """Measures as a Markdown table, measures that could not be taken left out; `reference` is the last row."""
    settings = [column for column in table.columns if column not in MEASURES]
    measured = [column for column in MEASURES if column in table and table[column].notna().any()]
    shown = table[settings].map(lambda value: f"{value:g}")
    if reference is not None:
        table = pd.concat([table, pd.DataFrame([reference])], ignore_index=True)
        shown.loc[len(shown)] = ["held-out text", *[""] * (len(settings) - 1)]
    for column in measured:
        shown[MEASURES[column]] = [format_measure(column, value) for value in table[column]]
    return shown.rename(columns={"top_p": "top-p"}).to_markdown(index=False, disable_numparse=True)


def format_measure(name: str, value: float) -> str:
    """A share as a percentage, a log-likelihood as it is; a dash where nothing could be measured."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.2f}".replace("-", "−") if name == "log_likelihood" else f"{100 * value:.1f}%"


def change(name: str, before: float, after: float) -> str:
    """In words: the share of known words rises from 81% to 99%."""
    old, new = format_measure(name, before), format_measure(name, after)
    subject = {
        "log_likelihood": "the log-likelihood per token",
        "repetition": "the share of repeated 4-grams",
        "known_words": "the share of words that occur in the corpus",
        "known_trigrams": "the share of their trigrams that do",
        "finished": "the share of documents that end by themselves",
        "accepted": "the share of finished documents that the grammar accepts",
    }[name]
    if not math.isfinite(before) or not math.isfinite(after):
        return f"{subject} is {old} before and {new} after"
    if old == new:
        return f"{subject} stays at {old}"
    return f"{subject} {'rises' if after > before else 'falls'} from {old} to {new}"


def changes(before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str]) -> str:
    """The changes of several measures as one clause; those that are the same on both sides are left out."""
    differing = [
        name
        for name in names
        if format_measure(name, before[name]) != format_measure(name, after[name])
        and not (name == "repetition" and abs(after[name] - before[name]) < ALIKE)
    ]
    return join_words([change(name, before[name], after[name]) for name in differing]) or "no measure changes"


def decoding_answer(agreeing: int, rows: int, without: int, with_cache: int) -> str:
    """decoding: what the decoder can do, and that its cache changes nothing but the work."""
    return (
        "`generate_text` continues any number of prompts in one batch until `<|endoftext|>` or `max_new_tokens`, with "
        "temperature, top-p and top-k. The distribution that is left equals the definition, computed above by hand. "
        f"With the KV cache {agreeing} of {rows} rows have exactly the tokens that they have without it, far beyond "
        f"the context; the model was fed {with_cache:,} positions instead of {without:,} "
        f"({format_significant(without / with_cache)} times fewer)."
    )


def fluency(found: Mapping[str, float], reference: Mapping[str, float]) -> str:
    """A verdict on samples by their measures beside those of held-out text."""

    def both(name: str) -> str:
        return f"{format_measure(name, found[name])}; held-out text {format_measure(name, reference[name])}"

    share = found["known_words"]
    amount = "Nearly all" if share >= FLUENT else "Most" if share >= HALTING else "Far from all"
    sentences = [
        f"{amount} of its words occur in the corpus ({both('known_words')}). Of every three words in a row, the share "
        f"that also follow each other in the corpus is {both('known_trigrams')}."
    ]
    if math.isfinite(found["repetition"]) and math.isfinite(reference["repetition"]):
        difference = found["repetition"] - reference["repetition"]
        amount = "about as much as" if abs(difference) < ALIKE else "more than" if difference > 0 else "less than"
        sentences.append(f"It repeats itself {amount} held-out text does (repeated 4-grams: {both('repetition')}).")
    finished = "All" if found["finished"] == 1 else f"{format_measure('finished', found['finished'])} of the"
    sentences.append(f"{finished} documents come to an end by themselves.")
    if found["accepted"] == 0:
        sentences.append("None of these is, to the last word, a story that the grammar of the corpus could have told.")
    elif math.isfinite(found["accepted"]):
        sentences.append(
            f"Of these, {format_measure('accepted', found['accepted'])} are stories that the grammar of the corpus "
            "could have told, right to the last word: names, pronouns and things agree from beginning to end."
        )
    return " ".join(sentences)


def generate_answer(
    chosen: Mapping[str, float],
    config: GenerateConfig,
    settings: pd.DataFrame,
    training: pd.DataFrame,
    reference: Mapping[str, float],
) -> str:
    """generate: the comment on fluency, and three factors that decide it, each by what was measured.

    `chosen` are the measures of the text that is shown, sampled with `config`; `settings` and `training` are tables of
    `measure_settings` and `measure_training`; `reference` holds the measures of held-out text.
    """
    names = ["known_words", "known_trigrams", "accepted", "repetition", "log_likelihood"]
    sampled = settings[settings["temperature"] > 0]
    whole = sampled[sampled["top_p"] == sampled["top_p"].max()].sort_values("temperature")
    cold, hot = whole.iloc[0], whole.iloc[-1]
    warm = sampled[sampled["temperature"] == hot["temperature"]].sort_values("top_p")
    narrow, wide = warm.iloc[0], warm.iloc[-1]
    training = training.sort_values("step")
    first, last = training.iloc[0], training.iloc[-1]
    return "\n\n".join(
        [
            f"**Fluency** ({setting_name(config)}). {fluency(chosen, reference)}",
            f"**Factor 1, the temperature.** From {cold['temperature']:g} to {hot['temperature']:g} (top-p "
            f"{hot['top_p']:g}) {changes(cold, hot, names)}. {_temperature_reading(cold, hot, reference)}",
            f"**Factor 2, top-p.** At temperature {hot['temperature']:g}, cutting the nucleus from "
            f"{wide['top_p']:g} to {narrow['top_p']:g}: {changes(wide, narrow, names)}.",
            f"**Factor 3, training.** From step {first['step']:.0f} to step {last['step']:.0f} "
            f"({setting_name(config)}): {changes(first, last, names)}.",
        ]
    )


def _temperature_reading(cold: Mapping[str, float], hot: Mapping[str, float], reference: Mapping[str, float]) -> str:
    """Where real text lies between the coldest and the hottest samples."""
    value = reference["log_likelihood"]
    low, high = sorted((cold["log_likelihood"], hot["log_likelihood"]))
    shown = format_measure("log_likelihood", value)
    if low <= value <= high:
        return f"Held-out text ({shown}) lies in between: the likeliest text is not the most natural one."
    side = "above" if value > high else "below"
    return f"Held-out text ({shown}) lies {side} both."
