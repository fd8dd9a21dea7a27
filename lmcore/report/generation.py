"""Measures of sampled text, and the figures of notebook 03."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from lmcore.config import require
from lmcore.functional import at_least_float32, cross_entropy
from lmcore.generate import Generation, TextCodec, evaluating
from lmcore.model import TransformerLM
from lmcore.report.figures import WARNING, category_colors, panels, sequence_colors

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
"""A word: letters, with apostrophes inside."""


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return [word.lower() for word in WORD.findall(text)]


def known_words(tokenizer: TextCodec, ids: Sequence[int], max_tokens: int = 10_000_000) -> frozenset[str]:
    """Every word that occurs in a corpus (its first `max_tokens` tokens)."""
    return frozenset(words(tokenizer.decode(np.asarray(ids[:max_tokens]).tolist())))


def documents_of(tokenizer: TextCodec, ids: Sequence[int], count: int, max_tokens: int) -> list[Generation]:
    """The first documents of a corpus in the form of samples: real text, cut where a sample would be."""
    ids = np.asarray(ids)
    ends = np.flatnonzero(ids == tokenizer.eot_id)[:count]
    starts = [0, *(ends[:-1] + 1)]
    documents = [ids[start : min(end, start + max_tokens)].tolist() for start, end in zip(starts, ends, strict=False)]
    return [
        Generation("", tokenizer.decode(row), row, "max_new_tokens" if len(row) == max_tokens else "end_of_text")
        for row in documents
    ]


def repetition(text: str, n: int = 4) -> float:
    """Share of the n-grams of words that have occurred before in the text; NaN if it has fewer than n words."""
    sequence = words(text)
    grams = [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def log_likelihood(model: TransformerLM, rows: Iterable[Sequence[int]], start: int) -> float:
    """Mean log-probability in nats per token that `model` itself (temperature 1) gives to documents.

    Each document is read from its beginning, after the token `start` (<|endoftext|>), as far as the context reaches.
    """
    device, total, count = next(model.parameters()).device, 0.0, 0
    with evaluating(model), torch.no_grad():
        for row in rows:
            ids = torch.tensor([start, *row][: model.config.context_length + 1], device=device)
            if len(ids) > 1:
                loss = cross_entropy(at_least_float32(model(ids[None, :-1])), ids[None, 1:])
                total, count = total - loss.item() * (len(ids) - 1), count + len(ids) - 1
    return total / count if count else math.nan


def measure(
    model: TransformerLM,
    tokenizer: TextCodec,
    samples: Sequence[Generation],
    vocabulary: frozenset[str],
    accepts: Callable[[str], bool] | None = None,
) -> dict[str, float]:
    """Measures of documents that were sampled from an empty prompt, each a mean over all of them.

    - `log_likelihood`: of the tokens under `model`, in nats per token;
    - `repetition`: share of repeated 4-grams of words within a document;
    - `known_words`: share of the words that are in `vocabulary` (a word cut off at the end does not count);
    - `finished`: share of the documents that ended by themselves;
    - `accepted`: share of the finished documents that `accepts` accepts; NaN without it or without any.
    """
    require(len(samples) > 0, "There are no samples to measure.")
    whole = [sample.stop == "end_of_text" for sample in samples]
    found = [words(s.text) if done else words(s.text)[:-1] for s, done in zip(samples, whole, strict=True)]
    spoken = [word for sequence in found for word in sequence]
    repeated = [repetition(sample.text) for sample in samples]
    endings = [accepts(s.text) for s, done in zip(samples, whole, strict=True) if done] if accepts is not None else []
    return {
        "log_likelihood": log_likelihood(model, [sample.ids for sample in samples], tokenizer.eot_id),
        "repetition": mean(value for value in repeated if math.isfinite(value)),
        "known_words": mean(word in vocabulary for word in spoken),
        "finished": mean(whole),
        "accepted": mean(endings),
    }


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


MARKUP = re.compile(r"""[\\`*_{}\[\]()#+.!|~$^>:=@'"<&-]""")


def quote(text: str, heading: str) -> str:
    """Sampled text under a heading as a Markdown block quote, with all that could be read as markup escaped."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    escaped = MARKUP.sub(lambda match: f"&#{ord(match[0])};", shown)
    paragraphs = [re.sub(r" *\n *", "\\\\\n> ", part.strip()) for part in re.split(r"\n\s*\n", escaped) if part.strip()]
    return f"**{heading}**\n\n> " + "\n>\n> ".join(paragraphs or ["&nbsp;"])


def truncation_figure(
    full: Sequence[float], truncated: Mapping[str, Sequence[float]], tokens: Sequence[str], shown: int = 24
) -> Figure:
    """Next-token distributions that decoding draws from, each (bars) over the model's own (outline).

    All are sorted from the likeliest token of `full`, as `next_token_distribution` gives them; `tokens` are the texts
    of the first ones, of which at most `shown` are drawn. Each panel says how many tokens of all are left.
    """
    columns = 2
    rows = math.ceil(len(truncated) / columns)
    shown = min(shown, len(tokens))
    figure, grid = panels(rows, columns, 0.9 + 1.45 * rows, sharex=True, sharey=True)
    place = np.arange(shown)
    colors = category_colors(len(truncated))
    for axes, color, (label, q) in zip(grid.flat, colors, truncated.items(), strict=False):
        q = np.asarray(q, dtype=float)
        kept = int((q > 0).sum())
        axes.bar(place, q[:shown], width=0.85, color=color, linewidth=0)
        axes.step(place, np.asarray(full)[:shown], where="mid", color="black", linewidth=0.9)
        if 0 < kept < shown:
            axes.axvline(kept - 0.5, color=WARNING, linestyle="--", linewidth=1)
        axes.set_title(label, loc="left", fontweight="normal")
        count = f"{kept:,} of {len(q):,} tokens\n{100 * q[:shown].sum():.0f}% in those shown"
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.98, 0.92, count, transform=axes.transAxes, ha="right", va="top", fontsize=8, bbox=background)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(-0.7, shown - 0.3)
    for axes in list(grid.flat)[len(truncated) :]:
        axes.set_visible(False)
    for column in range(columns):
        bottom = grid[(len(truncated) - 1 - column) // columns, column]
        labels = [token_label(token) for token in tokens[:shown]]
        bottom.set_xticks(place, labels, rotation=90, fontfamily="DejaVu Sans Mono", fontsize=7)
        bottom.tick_params(axis="x", labelbottom=True)
    figure.supylabel("probability", fontsize=9)
    return figure


def token_label(text: str) -> str:
    """A token's text for an axis: spaces visible, and what fonts may not have as an escape."""
    shown = (c if c.isprintable() and ord(c) < 0x250 else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).replace(" ", "\N{OPEN BOX}")


def measures_figure(
    table: pd.DataFrame,
    x: str,
    measures: Mapping[str, str],
    hue: str | None = None,
    reference: Mapping[str, float] | None = None,
    x_label: str | None = None,
) -> Figure:
    """Small multiples: each column of `table` in `measures` (with its label) against `x`, a line for each `hue`.

    `reference` has the value of a measure on real text, drawn dashed.
    """
    columns = 2
    rows = math.ceil(len(measures) / columns)
    figure, grid = panels(rows, columns, 0.7 + 1.75 * rows, sharex=True)
    groups = list(table.groupby(hue)) if hue else [(None, table)]
    for axes, (column, label) in zip(grid.flat, measures.items(), strict=False):
        for color, (value, rows_) in zip(sequence_colors(len(groups)), groups, strict=True):
            rows_ = rows_.sort_values(x)
            name = f"{hue} {value:g}" if hue else None
            axes.plot(rows_[x], rows_[column], color=color, marker="o", markersize=4, label=name)
        if reference is not None and math.isfinite(reference.get(column, math.nan)):
            axes.axhline(reference[column], color="black", linestyle="--", linewidth=1, label="held-out text")
        axes.set_title(label, loc="left", fontweight="normal")
        axes.margins(y=0.12)
    for axes in list(grid.flat)[len(measures) :]:
        axes.set_visible(False)
    for column in range(columns):
        bottom = grid[(len(measures) - 1 - column) // columns, column]
        bottom.set_xlabel(x_label or x)
        bottom.tick_params(axis="x", labelbottom=True)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return figure
