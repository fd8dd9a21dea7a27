"""Figures of notebook 04: times, warm-ups, FFN against attention, achieved FLOP/s, roofline."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from lmcore.profiling.workload import PHASES
from lmcore.workbook.report.answers import format_seconds
from lmcore.workbook.report.benchmark.roofline import ratio_table
from lmcore.workbook.report.benchmark.views import PASSES, chosen, complete, given, measured, size_label
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels, sequence_colors

PHASE_COLORS = dict(zip(PHASES, category_colors(len(PHASES)), strict=True))


MAX_LEVEL_LABELS = 4
"""Sizes under an axis whose names have room side by side."""


def seconds_axis(axis: Any) -> None:
    """Times in the unit that suits each, on an axis that is logarithmic or not."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value > 0 else "0"))
    axis.set_minor_formatter(NullFormatter())


def times_figure(table: pd.DataFrame, context: int, shown: Sequence[str] = ("fp32", "bf16")) -> Figure:
    """A training step by size and its phases, stacked: seconds on the left, shares on the right; a row a precision.

    Shares are those of the phases' medians in their sum. A size that could not be measured says how it ended.
    """
    steps = chosen(table, passes="train_step", context_length=context)
    precisions = [precision for precision in shown if len(chosen(steps, precision=precision))]
    tallest = max((len(chosen(steps, precision=p)) for p in precisions), default=1)
    rows = max(len(precisions), 1)
    figure, grid = panels(rows, 2, rows * (0.75 + 0.24 * tallest) + 0.35, sharey="row")
    for (seconds, shares), precision in zip(grid, precisions, strict=False):
        _stack(seconds, shares, chosen(steps, precision=precision).to_dict("records"))
        seconds.set_title(precision, loc="left")
    for axes, label in zip(grid[-1], ("median time of a step", "share of its phases"), strict=True):
        axes.set_xlabel(label)
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles[: len(PHASES)], labels[: len(PHASES)], loc="outside upper right", ncols=len(PHASES))
    return figure


def _stack(seconds: Axes, shares: Axes, rows: Sequence[dict]) -> None:
    done = [row for row in rows if measured(row)]
    longest = max((row["wall_median"] for row in done), default=1.0)
    for place, row in enumerate(rows):
        if not measured(row):
            seconds.annotate(
                row["outcome"], (0, place), (4, 0), textcoords="offset points", va="center", color=WARNING, fontsize=8
            )
            continue
        values = {phase: row[f"{phase}_median"] if given(row[f"{phase}_median"]) else 0.0 for phase in PHASES}
        left, whole = 0.0, sum(values.values())
        for phase, value in values.items():
            label = phase if row is done[0] else None
            seconds.barh(place, value, left=left, color=PHASE_COLORS[phase], label=label)
            shares.barh(place, value / whole, left=left / whole, color=PHASE_COLORS[phase])
            left += value
        seconds.annotate(
            format_seconds(row["wall_median"]),
            (left, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    seconds.set_yticks(range(len(rows)), [size_label(row) for row in rows])
    seconds.invert_yaxis()
    seconds.set_xlim(0, 1.22 * longest)
    seconds.xaxis.set_major_locator(MaxNLocator(4))
    seconds_axis(seconds.xaxis)
    shares.set_xlim(0, 1)
    shares.xaxis.set_major_formatter(PercentFormatter(1))
    for axes in (seconds, shares):
        axes.grid(visible=False, axis="y")


def contexts_figure(table: pd.DataFrame, precision: str = "fp32") -> Figure:
    """Median time by context for each size, a panel for each of the passes that has several contexts.

    Both axes are logarithmic; a red cross at the upper edge stands where a size could not be measured.
    """
    at = chosen(table, precision=precision)
    kinds = [p for p in PASSES if chosen(at, passes=p)["context_length"].nunique() > 1] or list(PASSES)[:1]
    kinds = list(dict.fromkeys((kinds[0], kinds[-1])))
    figure, (row,) = panels(1, len(kinds), 3.4, sharey=True)
    sizes = list(dict.fromkeys(at["size"]))
    contexts = sorted(set(at["context_length"]))
    for axes, passes in zip(row, kinds, strict=True):
        cells = chosen(at, passes=passes)
        for number, (color, size) in enumerate(zip(sequence_colors(len(sizes)), sizes, strict=True)):
            line = chosen(cells, size=size).sort_values("context_length")
            done = complete(line)
            axes.plot(done["context_length"], done["wall_median"], color=color, marker="o", markersize=4, label=size)
            lost = line[~line.index.isin(done.index)]
            shift = 1 + 0.1 * (number - len(sizes) / 2)  # crosses of two sizes side by side
            for context in lost["context_length"]:
                axes.plot(
                    context * shift, 1, "X", color=color, markeredgecolor=WARNING, markersize=8,
                    transform=axes.get_xaxis_transform(), clip_on=False,
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        _log_times(axes, len(complete(at)) > 0)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{PASSES[passes]}, {precision}")
        axes.set_xlabel("context length")
        axes.margins(x=0.1)
    row[0].set_ylabel("median time of a step")
    note = "\n× not measured" if len(complete(at)) < len(at) else ""
    row[-1].legend(title=f"size{note}", **LEGEND_BESIDE)
    return figure


def _log_times(axes: Axes, any_measured: bool) -> None:
    if not any_measured:
        return _nothing(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=12))
    seconds_axis(axes.yaxis)
    return None


def _nothing(axes: Axes) -> None:
    axes.set_yticks([])
    axes.annotate("nothing was measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=WARNING, fontsize=8)


def warmups_figure(samples: pd.DataFrame) -> Figure:
    """Every step by number, a panel a size and a line for each number of warm-ups; warm-ups are hollow."""
    sizes = list(dict.fromkeys(samples["size"]))
    figure, grid = panels(max(len(sizes), 1), 1, 0.5 + 2.2 * max(len(sizes), 1), sharex=True)
    for (axes,), size in zip(grid, sizes, strict=False):
        at = chosen(samples, size=size)
        counts = sorted(set(at["warmup_steps"]))
        for place, (color, count) in enumerate(zip(category_colors(len(counts)), counts, strict=True)):
            steps = chosen(at, warmup_steps=count).sort_values("step")
            steps = steps.assign(step=steps["step"] + 0.14 * (place - (len(counts) - 1) / 2))  # side by side
            warm = steps["warmup"].astype(bool)
            axes.plot(steps["step"], steps["wall"], color=color, linewidth=1, alpha=0.6)
            axes.plot(steps["step"][~warm], steps["wall"][~warm], "o", color=color, markersize=4.5, label=f"{count}")
            axes.plot(
                steps["step"][warm], steps["wall"][warm], "o", color=color, markersize=4.5, markerfacecolor="white"
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        seconds_axis(axes.yaxis)
        axes.set(ylabel=f"time of the step\n({size})")
        axes.margins(y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1][0].set_xlabel("step, from 1 at the first")
    grid[0][0].legend(title="warm-ups\n(hollow)", **LEGEND_BESIDE)
    return figure


def ffn_attention_figure(components: pd.DataFrame) -> Figure:
    """FFN over attention by time and by FLOPs for each cell, and where the time of the largest cell's parts goes."""
    rows = ratio_table(components)
    cells = list(dict.fromkeys(rows["cell"]))
    figure, ((ratios, parts),) = panels(1, 2, 3.6, width_ratios=(1, 1.15))
    colors = category_colors(3)
    for number, cell in enumerate(cells):
        at = chosen(rows, cell=cell).set_index("direction")
        bars = [("by FLOPs", at["by_flops"].iloc[0]), *((name, at.loc[name, "measured"]) for name in at.index)]
        for place, ((name, value), color) in enumerate(zip(bars, [MUTED, *colors], strict=False)):
            ratios.barh(number + 0.27 * (place - 1), value, 0.25, color=color, label=name if number == 0 else None)
    ratios.axvline(1, color="black", linewidth=0.8, linestyle=":")
    ratios.set_yticks(range(len(cells)), [_cell_label(rows, cell) for cell in cells])
    ratios.invert_yaxis()
    ratios.set_xlabel("FFN / attention")
    ratios.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=1)
    ratios.grid(visible=False, axis="y")
    if cells:
        _shares_of_parts(parts, chosen(components, cell=cells[-1]), _cell_label(rows, cells[-1]))
    return figure


def _cell_label(rows: pd.DataFrame, cell: str) -> str:
    row = chosen(rows, cell=cell).iloc[0]
    extra = [str(row[name]) for name in ("context_length", "precision") if rows[name].nunique() > 1]
    return " ".join([size_label(row), *extra])


def _shares_of_parts(axes: Axes, components: pd.DataFrame, title: str) -> None:
    """Share of the block's time and of its FLOPs, of each part of attention and FFN."""
    parts = components[components["part_of"].isin(["attention", "ffn"]) & (components["kind"] != "whole")]
    place = np.arange(len(parts))
    for shift, column, color, label in (
        (-0.2, "seconds", category_colors(1)[0], "time"),
        (0.2, "flops", MUTED, "FLOPs"),
    ):
        axes.barh(place + shift, parts[column] / parts[column].sum(), 0.38, color=color, label=label)
    axes.set_yticks(place, parts["component"])
    axes.invert_yaxis()
    first_of_ffn = int((parts["part_of"] == "attention").sum())
    axes.axhline(first_of_ffn - 0.5, color=MUTED, linewidth=0.8)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title(f"parts of a block, {title}")
    axes.set_xlabel("share of all parts, forward")
    axes.legend(loc="lower right")
    axes.grid(visible=False, axis="y")


def utilization_figure(table: pd.DataFrame, context: int, passes: str) -> Figure:
    """Achieved FLOP/s by size and precision; beside it MFU, where the chip's peaks are known."""
    at = chosen(table, context_length=context, passes=passes)
    done = complete(at)
    sizes, precisions = list(dict.fromkeys(at["size"])), list(dict.fromkeys(at["precision"]))
    known = done["mfu"].notna().any()
    figure, (row,) = panels(1, 2 if known else 1, 3.1)
    for axes, column in zip(row, ("flops_per_second", "mfu"), strict=False):
        for color, precision in zip(category_colors(len(precisions)), precisions, strict=True):
            line = chosen(done, precision=precision)
            places = [sizes.index(size) for size in line["size"]]
            axes.plot(places, line[column].astype(float), color=color, marker="o", markersize=4.5, label=precision)
        turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(sizes) > MAX_LEVEL_LABELS else {}
        axes.set_xticks(range(len(sizes)), sizes, **turned)
        axes.margins(x=0.08)
    if len(done):
        row[0].set_yscale("log")
        row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        row[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: _flops_tick(value)))
        row[0].yaxis.set_minor_formatter(NullFormatter())
    else:
        _nothing(row[0])
    row[0].set_ylabel(f"achieved in a {PASSES[passes]}")
    if known:
        row[1].yaxis.set_major_formatter(PercentFormatter(1))
        row[1].set_ylim(bottom=0)
        row[1].set_ylabel("MFU")
    row[-1].legend(title="precision", **LEGEND_BESIDE)
    return figure


def _flops_tick(value: float) -> str:
    return f"{value / 1e12:g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:g} GFLOP/s"
