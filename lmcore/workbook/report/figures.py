"""Figures of the workbook, and how they look. A figure is made from tables and saved as the same SVG every time."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
import seaborn
from IPython.display import SVG
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lmcore.files import atomic_write

WIDTH = 6.6
"""Width of a figure in inches: the text width of a page."""

WARNING, MUTED = "#c0392b", "#8a8f98"
"""Colors of what went wrong, and of what is there for comparison."""

MAX_LEGEND_INSIDE = 3

LEGEND_BESIDE: dict[str, Any] = {
    "loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0, "alignment": "left"
}  # fmt: skip
"""Options of a legend to the right of the axes."""

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so text is set alike everywhere
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.edgecolor": "#555555",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e6ea",
    "grid.linewidth": 0.7,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}

# text as paths: neither a browser nor Typst needs the font; identifiers from a fixed salt
SVG_STYLE = {"svg.hashsalt": "lmcore", "svg.fonttype": "path"}

X_LABELS = {"step": "step", "tokens": "tokens", "seconds": "wall-clock time"}


def use_style() -> None:
    """Sets matplotlib up for this module's figures; to be called once, before the first of them."""
    seaborn.set_theme(context="paper", style="whitegrid", palette="colorblind", rc=STYLE | SVG_STYLE)


def save_figure(figure: Figure, path: str | os.PathLike, **options: Any) -> Path:
    """Writes `figure` as SVG, atomically: no date, fixed identifiers, so that equal figures are equal files."""
    with matplotlib.rc_context(SVG_STYLE), atomic_write(path) as file:
        figure.savefig(file, format="svg", metadata={"Date": None}, **options)
    return Path(path)


def show_figure(figure: Figure, path: str | os.PathLike, caption: str) -> SVG:
    """Saves `figure` and returns the saved picture for a notebook to show; the writeup sets `caption` under it."""
    return SVG(save_figure(figure, path).read_text(encoding="utf-8"), metadata={"caption": caption})


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure as wide as the page with a grid of axes; `height` in inches is that of the whole figure."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def learning_curves(
    runs: Mapping[str, pd.DataFrame],
    x: Literal["step", "tokens", "seconds"] = "step",
    floor: float | None = None,
    floor_label: str = "entropy of the source",
) -> Figure:
    """Training loss (thin) and validation loss (bold, with dots) of each run in nats per token; `floor` is dashed.

    `runs` maps a label to its metrics (`RunFolder.metrics`). The first steps are cut off above: the axis reaches up to
    the highest validation loss or three times the lowest, and far enough to show where runs end. Training losses are
    averaged to at most 200 points.
    """
    figure, ((axes,),) = panels(1, 1, 3.4)
    unit, x_label = _time_unit(runs.values()) if x == "seconds" else (1, X_LABELS[x])
    for color, (label, metrics) in zip(category_colors(len(runs)), runs.items(), strict=True):
        train, valid = _finite(metrics, "train_loss"), _finite(metrics, "valid_loss")
        train = thinned(train[[x, "train_loss"]])
        axes.plot(train[x] / unit, train["train_loss"], color=color, linewidth=0.8, alpha=0.5 if len(runs) < 4 else 0.3)
        axes.plot(valid[x] / unit, valid["valid_loss"], color=color, linewidth=2, marker="o", markersize=3, label=label)
    if floor is not None:
        axes.axhline(floor, color="black", linestyle="--", linewidth=1, label=f"{floor_label} ({floor:.3f})")
    _loss_limits(axes, runs.values(), floor)
    axes.set(xlabel=x_label, ylabel="loss (nats per token)")
    axes.set_xlim(left=0)
    if x != "seconds":
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
    title = "bold: validation\nthin: training"
    _legend(axes, title=title)
    return figure


def learning_rate_sweep(table: pd.DataFrame) -> Figure:
    """Final validation loss and largest training spike by learning rate.

    A run that diverged has no final loss: a red cross at the upper edge stands at its learning rate.
    """
    figure, ((losses,), (spikes,)) = panels(2, 1, 4.2, sharex=True, height_ratios=(3, 1.3))
    done = table[table["outcome"] == "complete"].sort_values("learning_rate")
    losses.plot(done["learning_rate"], done["final_valid_loss"], marker="o", markersize=4.5)
    spikes.plot(done["learning_rate"], done["max_spike"], marker="o", markersize=3, clip_on=False)
    _mark_diverged(losses, table[table["outcome"] == "diverged"])
    _mark_best(losses, done)
    losses.set(ylabel="final validation loss\n(nats per token)")
    spikes.set(xlabel="maximum learning rate", ylabel="largest spike\n(nats)")
    spikes.set_ylim(bottom=0)
    _rate_axis(spikes, sorted(table["learning_rate"].unique()))
    _legend(losses)
    return figure


def schedule_figure(schedules: Mapping[str, Sequence[float]], key_steps: Mapping[str, int] | None = None) -> Figure:
    """Learning rate by step (from 0) of each schedule; `key_steps` names steps to draw a vertical line at."""
    figure, ((axes,),) = panels(1, 1, 2.7)
    for color, (label, rates) in zip(category_colors(len(schedules)), schedules.items(), strict=True):
        axes.plot(np.arange(len(rates)), rates, color=color, label=label)
    for name, step in (key_steps or {}).items():
        axes.axvline(step, color=MUTED, linestyle=":", linewidth=1)
        axes.annotate(
            name, (step, 1), (0, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha="center", fontsize=8, color="#555555",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="learning rate")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.legend(loc="upper right", bbox_to_anchor=(0.94, 1))  # left of the line at the last step
    return figure


def sgd_toy_figure(losses: Mapping[float, Sequence[float]]) -> Figure:
    """Loss by iteration for each learning rate, on a logarithmic axis; a cross marks the last one before overflow."""
    figure, ((axes,),) = panels(1, 1, 3.0)
    for color, (rate, values) in zip(category_colors(len(losses)), losses.items(), strict=True):
        values = np.asarray(values, dtype=float)
        end = next((i for i, value in enumerate(values) if not math.isfinite(value)), len(values))
        shown = values[:end]
        axes.plot(np.arange(end), shown, color=color, marker="o", markersize=3.5, label=f"learning rate {rate:g}")
        if 0 < end < len(values):
            axes.plot(end - 1, shown[-1], "X", color=WARNING, markersize=9, zorder=3)
            axes.annotate(
                "then not finite", (end - 1, shown[-1]), (8, -3), textcoords="offset points",
                fontsize=8, color=WARNING,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="iteration", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


def category_colors(count: int) -> list:
    """Colors for things without an order: told apart also by color-blind readers, up to ten."""
    return seaborn.color_palette("colorblind", count)


def sequence_colors(count: int) -> list:
    """Colors for values in order, dark to light."""
    return seaborn.color_palette("viridis", count) if count > 1 else seaborn.color_palette("colorblind", 1)


def _finite(metrics: pd.DataFrame, column: str) -> pd.DataFrame:
    return metrics[np.isfinite(metrics[column].astype(float))]


def thinned(table: pd.DataFrame, points: int = 200) -> pd.DataFrame:
    """Means over so many neighboring rows that at most `points` are left."""
    return table.groupby(np.arange(len(table)) // math.ceil(max(len(table), 1) / points)).mean()


def _time_unit(tables: Any) -> tuple[float, str]:
    longest = max((table["seconds"].max() for table in tables), default=0)
    for seconds, name in ((3600, "hours"), (60, "minutes")):
        if longest > 2 * seconds:
            return seconds, f"wall-clock time ({name})"
    return 1, "wall-clock time (seconds)"


def _loss_limits(axes: Axes, tables: Any, floor: float | None) -> None:
    """From just below the lowest loss or the floor, up to three times that or the highest validation loss.

    A run that ends higher is still shown, unless it ends above the first losses: that one has diverged.
    """
    tables = list(tables)
    valid = np.concatenate([_finite(table, "valid_loss")["valid_loss"] for table in tables] or [np.array([])])
    train = np.concatenate([_finite(table, "train_loss")["train_loss"] for table in tables] or [np.array([])])
    values = valid if len(valid) else train
    if not len(values):
        return
    low = min([*values, *train, *([floor] if floor is not None else [])])
    start = min((table["train_loss"].iloc[0] for table in tables if len(table)), default=math.inf)
    ends = [end for table in tables for end in _finite(table, "valid_loss")["valid_loss"].iloc[-1:] if end <= start]
    high = min(max(values), max(3 * min(values), *ends, low))
    axes.set_ylim(low - 0.06 * (high - low) - 0.01, high + 0.08 * (high - low) + 0.01)


def _rate_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each of the learning rates, thinned out until the labels have room."""
    axes.set_xscale("log")
    every = math.ceil(len(values) / 10)
    ticks = list(values)[::every]
    axes.set_xticks(ticks, [_rate(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(LogLocator(numticks=1))
    axes.margins(x=0.08)


def _rate(value: float) -> str:
    """A learning rate, short: 1e-3, 2.5e-4."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _short(value: float, _: Any = None) -> str:
    """A count on an axis: 500, 20k, 1.5M."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):g}{suffix}"
    return f"{value:g}"


def _mark_diverged(axes: Axes, runs: pd.DataFrame) -> None:
    """Red crosses at the upper edge, with the earliest step at which a run diverged there."""
    if not len(runs):
        return
    edge, top = axes.get_xaxis_transform(), np.ones(len(runs))
    label = "diverged (at step)"
    axes.plot(runs["learning_rate"], top, "X", color=WARNING, markersize=9, transform=edge, clip_on=False, label=label)
    for value, steps in runs.groupby("learning_rate")["diverged_at_step"]:
        axes.axvline(value, color=WARNING, linewidth=0.8, alpha=0.35)
        place = {"xycoords": edge, "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{steps.min():.0f}", (value, 1), (0, 7), color=WARNING, fontsize=7.5, **place)


def _mark_best(axes: Axes, done: pd.DataFrame) -> None:
    done = done.dropna(subset="final_valid_loss")
    if len(done):
        best = done.loc[done["final_valid_loss"].idxmin()]
        axes.annotate(
            f"{best['final_valid_loss']:.3f}", (best["learning_rate"], best["final_valid_loss"]), (0, -12),
            textcoords="offset points", ha="center", fontsize=8, fontweight="bold",
        )  # fmt: skip
        axes.margins(y=0.15)


def _legend(axes: Axes, title: str | None = None) -> None:
    """Inside while it is small; else to the right of the axes, where it covers nothing."""
    _, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    if len(labels) <= MAX_LEGEND_INSIDE:
        axes.legend(title=title, loc="best", alignment="left")
    else:
        axes.legend(title=title, **LEGEND_BESIDE)
