"""Figures of notebook 04 on the optimisation report."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from lmcore.workbook.report.benchmark.optimizations import optimizations_table
from lmcore.workbook.report.benchmark.study import done, has_memory
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels

GB = 1e9

MEASURES = {
    "tokens_per_second": ("tokens per second", 1.0),
    "peak_memory_bytes": ("peak memory (GB)", GB),
}
"""Label and unit of the measured columns."""


def _measures(table: pd.DataFrame) -> list[str]:
    """Throughput always, memory where it is known: a CPU's is not."""
    return list(MEASURES) if has_memory(done(table)) else ["tokens_per_second"]


def _panel(axes: Axes, measure: str) -> float:
    """Labels the axes for a measure and returns its unit."""
    label, unit = MEASURES[measure]
    axes.set(ylabel=label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"))
    return unit


def batch_figure(table: pd.DataFrame) -> Figure:
    """Throughput and peak memory as groups of bars by batch size, one bar for each precision.

    A red word stands in place of a bar whose cell did not fit or failed.
    """
    measures = _measures(table)
    figure, grid = panels(1, len(measures), 2.9)
    sizes, kinds = sorted(table["batch_size"].unique()), list(dict.fromkeys(table["precision"]))
    width = 0.8 / len(kinds)
    for axes, measure in zip(grid[0], measures, strict=True):
        unit = _panel(axes, measure)
        for number, (kind, color) in enumerate(zip(kinds, category_colors(len(kinds)), strict=True)):
            rows = table[table["precision"] == kind].set_index("batch_size")
            places = {size: place + (number - (len(kinds) - 1) / 2) * width for place, size in enumerate(sizes)}
            good = done(rows)
            values = good[measure].astype(float) / unit
            axes.bar([places[size] for size in good.index], values, width, color=color, label=kind, linewidth=0)
            for size, row in rows[rows["outcome"] != "complete"].iterrows():
                _word(axes, places[size], row["outcome"])
        axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes.set(xlabel="batch size")
        axes.grid(axis="x", visible=False)
    grid[0][-1].legend(**LEGEND_BESIDE)
    return figure


def _word(axes: Axes, x: float, word: str) -> None:
    """Writes upwards from the axis what happened instead of a bar."""
    axes.annotate(
        word, (x, 0), (0, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
        rotation=90, ha="center", va="bottom", fontsize=6.5, color=WARNING,
    )  # fmt: skip


def context_figure(table: pd.DataFrame) -> Figure:
    """Throughput and peak memory against the context; dashed, what growth in proportion would make of the first."""
    measures = _measures(table)
    figure, grid = panels(1, len(measures), 2.7)
    rows, contexts = done(table).sort_values("context_length"), sorted(table["context_length"].unique())
    for axes, measure in zip(grid[0], measures, strict=True):
        unit = _panel(axes, measure)
        values = rows[measure].astype(float) / unit
        axes.plot(rows["context_length"], values, marker="o", markersize=4.5)
        if measure == "peak_memory_bytes" and len(rows) > 1:
            line = values.iloc[0] * rows["context_length"] / rows["context_length"].iloc[0]
            axes.plot(rows["context_length"], line, color=MUTED, linestyle="--", linewidth=1, label="in proportion")
            axes.legend(loc="upper left")
        for row in table[table["outcome"] != "complete"].to_dict("records"):
            _word(axes, row["context_length"], row["outcome"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="context length")
        axes.set_ylim(bottom=0)
        axes.set_xlim(contexts[0] / 1.2, contexts[-1] * 1.2)  # also where nothing was measured at the last
    return figure


def optimizations_figure(table: pd.DataFrame) -> Figure:
    """Throughput and peak memory with each optimization, and the change against the baseline on its bar."""
    rows, measures = optimizations_table(table), _measures(table)
    figure, grid = panels(1, len(measures), 2.7)
    changes = {"tokens_per_second": "throughput", "peak_memory_bytes": "memory"}
    colors = category_colors(len(rows))
    for axes, measure in zip(grid[0], measures, strict=True):
        unit = _panel(axes, measure)
        axes.bar(range(len(rows)), (rows[measure] / unit).fillna(0), 0.65, color=colors, linewidth=0)
        for place, row in enumerate(rows.to_dict("records")):
            if row["outcome"] != "complete":
                _word(axes, place, row["outcome"])
            elif row["name"] != "baseline" and np.isfinite(row[changes[measure]]):
                _above(axes, place, row[measure] / unit, f"{100 * row[changes[measure]]:+.1f}%".replace("-", "−"))
        axes.set_xticks(range(len(rows)), [name.replace(" ", "\n") for name in rows["name"]], fontsize=7)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
    return figure


def _above(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", fontsize=8)
