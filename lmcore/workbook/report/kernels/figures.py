"""Figures of notebook 07: attention by length, the ladder of a step, two learning curves and their difference."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lmcore.workbook.report.answers import format_bytes, format_seconds, format_significant
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels

KINDS = {"plain": "definition", "sdpa": "PyTorch's SDPA", "flash": "ours"}
"""What `ModelConfig.attention` names, for readers."""

PASSES = {"forward": "forward", "both": "forward + backward"}


def attention_figure(table: pd.DataFrame) -> Figure:
    """Memory and time of attention by length, forward and backward pass together, a line for each kind.

    Dashed: growth with the square of the length, from the definition's last point backwards. A cross at the upper edge
    stands for what did not fit into the memory.
    """
    rows = table[table["passes"] == "both"]
    known = rows["extra_bytes"].notna().any()
    figure, (axes,) = panels(1, 2 if known else 1, 3.1)
    measures = [("extra_bytes", "memory beside the inputs", lambda value: format_bytes(value, 1))] * bool(known)
    measures += [("seconds", "median time", format_seconds)]
    for place, (measure, label, text) in zip(axes, measures, strict=True):
        lines = {KINDS[kind]: part for kind, part in rows.groupby("attention", sort=False)}
        by_length(place, lines, measure)
        squared(place, lines.get(KINDS["plain"]), measure)
        place.set_ylabel(label)
        readable_log(place.yaxis, text)
    axes[-1].legend(**LEGEND_BESIDE)
    return figure


def by_length(axes: Axes, lines: Mapping[str, pd.DataFrame], measure: str, log: bool = True) -> None:
    """A line of `measure` by context_length for each table in `lines`; what was lost is a cross at the upper edge."""
    contexts = sorted({context for rows in lines.values() for context in rows["context_length"]})
    for color, (label, rows) in zip(category_colors(len(lines)), lines.items(), strict=True):
        rows = rows.sort_values("context_length")
        values = rows[measure].astype(float)
        done = rows[values.notna()]
        axes.plot(
            done["context_length"], done[measure].astype(float), color=color, marker="o", markersize=4, label=label
        )
        for context in rows.loc[rows["outcome"] == "out of memory", "context_length"]:
            axes.plot(
                context, 1, "X", color=color, markeredgecolor=WARNING, markersize=8,
                transform=axes.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    context_ticks(axes, contexts)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(LogLocator(base=2, numticks=1))
    axes.set_xlabel("context length")
    axes.margins(x=0.08)


def context_ticks(axes: Axes, contexts: Sequence[int]) -> None:
    """A tick for each length; with many of them in short: 512, 1k, 2k."""
    short = len(contexts) > 4
    labels = [f"{length // 1024}k" if short and length % 1024 == 0 else f"{length:,}" for length in contexts]
    axes.set_xticks(list(contexts), labels)


def squared(axes: Axes, rows: pd.DataFrame | None, measure: str) -> None:
    """A dashed line through the last point of `rows` that grows with the square of the length."""
    if rows is None:
        return
    done = rows.dropna(subset=measure).sort_values("context_length")
    if len(done) < 2:
        return
    contexts, values = done["context_length"].astype(float), done[measure].astype(float)
    line = values.iloc[-1] * (contexts / contexts.iloc[-1]) ** 2
    axes.plot(contexts, line, color=MUTED, linestyle="--", linewidth=1, label="∝ length²", zorder=0)


def readable_log(axis, text) -> None:
    """A logarithmic axis with a few labels that `text` writes."""
    axis.set_major_locator(LogLocator(base=10, subs=(1, 3), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value) if value > 0 else "0"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(LogLocator(numticks=1))


def ladder_figure(names: Sequence[str], seconds: Sequence[float | None], notes: Sequence[str]) -> Figure:
    """Time of a step on each rung as a bar, with the speed over the first rung; a rung without a time has its note."""
    figure, ((axes,),) = panels(1, 1, 0.75 + 0.33 * len(names))
    values = [None if value is None or pd.isna(value) else float(value) for value in seconds]
    first = next((value for value in values if value is not None), None)
    longest = max((value for value in values if value is not None), default=1.0)
    (color,) = category_colors(1)
    for place, (value, note) in enumerate(zip(values, notes, strict=True)):
        if value is None:
            words, left, style = note, 0.0, WARNING
        else:
            axes.barh(place, value, 0.62, color=color, linewidth=0)
            ratio = "" if value == first else f"   {format_significant(first / value)} ×"
            words, left, style = f"{format_seconds(value)}{ratio}", value, "black"
        axes.annotate(
            words, (left, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=style
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
    axes.set_xlabel("median time of a training step")
    axes.grid(visible=False, axis="y")
    return figure


def curves_figure(curves: Mapping[str, pd.DataFrame], tolerance: float) -> Figure:
    """Training losses of the runs, and below the relative difference of each to the first, with the tolerance."""
    figure, ((losses,), (differences,)) = panels(2, 1, 4.2, sharex=True, height_ratios=(2, 1.2))
    labels, tables = list(curves), list(curves.values())
    for number, (label, color) in enumerate(zip(labels, category_colors(len(labels)), strict=True)):
        rows = tables[number]
        style = {"linewidth": 3.4, "alpha": 0.45} if number == 0 else {"linewidth": 1.1}
        losses.plot(rows["step"], rows["train_loss"], color=color, label=label, **style)
        if number:
            step, difference = relative_difference(rows, tables[0])
            differences.plot(step, difference, color=color, linewidth=1)
    differences.axhspan(-tolerance, tolerance, color=MUTED, alpha=0.25, linewidth=0, label="tolerance")
    differences.axhline(0, color="black", linewidth=0.6)
    differences.set_ylim(-1.6 * tolerance, 1.6 * tolerance)
    differences.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%".replace("-", "−")))
    differences.set(xlabel="step", ylabel="difference")
    losses.set_ylabel("training loss\n(nats per token)")
    losses.legend(**LEGEND_BESIDE)
    differences.legend(**LEGEND_BESIDE)
    return figure


def relative_difference(rows: pd.DataFrame, reference: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Steps that both runs have a line for, and there (loss − reference) / reference."""
    both = rows[["step", "train_loss"]].merge(reference[["step", "train_loss"]], on="step", suffixes=("", "_reference"))
    return both["step"].to_numpy(), (both["train_loss"] / both["train_loss_reference"] - 1).to_numpy()
