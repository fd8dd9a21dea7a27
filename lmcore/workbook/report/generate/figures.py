"""Figures of notebook 03: the distributions that decoding draws from, and measures of what was sampled."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lmcore.workbook.report.figures import WARNING, category_colors, panels, sequence_colors


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
        count = f"{kept:,} of {len(q):,} tokens\n{100 * q[:shown].sum():.0f}% on those shown"
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
            name = f"{hue.replace('_', '-')} {value:g}" if hue else None
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
