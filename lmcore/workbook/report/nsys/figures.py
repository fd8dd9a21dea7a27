"""Figures of notebook 05: shares of kinds of kernels, parts of attention, busy and idle time."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from lmcore.profiling.nsys.kinds import KINDS
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, category_colors, panels, sequence_colors
from lmcore.workbook.report.nsys.tables import ATTENTION_PARTS
from lmcore.workbook.report.nsys.wording import given, size_label

KIND_COLORS = dict(zip(KINDS, category_colors(len(KINDS)), strict=True))

ATTENTION_COLORS = dict(
    zip(
        ATTENTION_PARTS,
        (KIND_COLORS["matmul"], KIND_COLORS["elementwise"], KIND_COLORS["softmax/reduction"], "#56b4e9"),
        strict=True,
    )
)

PANELS = {"inference": "inference", "training": "training step"}
"""Ranges of the tables that stand side by side, and their titles."""

MIN_LABELLED_SHARE = 0.13
"""Smallest part of a bar that has room for its percentage, in a figure of two columns of bars."""


def shares_figure(table: pd.DataFrame, kinds: pd.DataFrame, precision: str = "fp32") -> Figure:
    """Kinds of kernels as shares of time, in inference and in a training step: a bar for each size.

    At the context that most sizes were profiled at in this precision, the largest of several; what did not fit says so.
    """
    chosen = table[table["precision"] == precision]
    counts = chosen[chosen["inference_seconds"].notna()].groupby("context_length").size()
    context = max(counts.index, key=lambda length: (counts[length], length))
    chosen = chosen[chosen["context_length"] == context]
    rows = chosen.to_dict("records")
    figure, (axes,) = panels(1, 2, max(1.9, 0.8 + 0.34 * len(rows)), sharey=True)
    shown = kinds[kinds["cell"].isin(chosen["cell"]) & kinds["range"].isin(PANELS)]
    names = [kind for kind in KINDS if kind in set(shown["kind"])]
    for own, (label, title) in zip(axes, PANELS.items(), strict=True):
        for place, row in enumerate(rows):
            shares = shown[(shown["cell"] == row["cell"]) & (shown["range"] == label)].set_index("kind")["share"]
            _stacked(own, place, [(shares.get(kind, 0.0), KIND_COLORS[kind]) for kind in names])
            if not len(shares):
                outcome = row["training_outcome"] if label == "training" else row["outcome"]
                own.text(
                    0.02, place, outcome if given(outcome) else "not profiled", va="center", fontsize=8, color=MUTED
                )
        _share_axis(own, f"{title}, context {context:,}")
    axes[0].set_yticks(range(len(rows)), [size_label(row) for row in rows])
    beyond = max(0.5, 1.5 - len(rows) / 2)  # a single bar is not to fill the figure
    axes[0].set_ylim(len(rows) - 1 + beyond, -beyond)
    _patches(axes[-1], names, [KIND_COLORS[kind] for kind in names])
    return figure


def _stacked(axes: Axes, place: float, pieces: Sequence[tuple[float, object]], height: float = 0.74) -> None:
    """A horizontal bar of shares, with percentages where there is room."""
    left = 0.0
    for share, color in pieces:
        axes.barh(place, share, left=left, color=color, height=height, linewidth=0)
        if share >= MIN_LABELLED_SHARE:
            axes.text(
                left + share / 2, place, f"{100 * share:.0f}%", ha="center", va="center", fontsize=7, color="white"
            )
        left += share


def _share_axis(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75])
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(visible=False, axis="y")


def _patches(axes: Axes, names: Sequence[str], colors: Sequence) -> None:
    handles = [axes.barh(0, 0, color=color, label=name) for name, color in zip(names, colors, strict=True)]
    axes.legend(handles, names, **LEGEND_BESIDE)


def fullest_size(table: pd.DataFrame, column: str = "inference_seconds") -> str | None:
    """The last size with as many contexts as any has, of the first precision; None for an empty table."""
    done = table[table[column].notna()]
    done = done[done["precision"] == done["precision"].iloc[0]] if len(done) else done
    counts = done.groupby("size", sort=False)["context_length"].nunique()
    return counts[counts == counts.max()].index[-1] if len(counts) else None


def contexts_figure(table: pd.DataFrame, kinds: pd.DataFrame, size: str | None = None) -> Figure:
    """Time of each kind of kernels by context, of one size, on logarithmic axes; `size` None: `fullest_size`."""
    size = size or fullest_size(table)
    precision = table["precision"].iloc[0]
    own = kinds[(kinds["size"] == size) & (kinds["precision"] == precision) & (kinds["seconds"] > 0)]
    figure, (axes,) = panels(1, 2, 2.9, sharey=True)
    names = [kind for kind in KINDS if kind in set(own.loc[own["range"].isin(PANELS), "kind"])]
    for place, (label, title) in zip(axes, PANELS.items(), strict=True):
        for kind in names:
            rows = own[(own["range"] == label) & (own["kind"] == kind)].sort_values("context_length")
            style = {"marker": "o", "markersize": 4, "color": KIND_COLORS[kind], "label": kind}
            place.plot(rows["context_length"], 1e3 * rows["seconds"].astype(float), **style)
        _context_axis(place, sorted(own["context_length"].unique()))
        place.set_yscale("log")
        place.set_title(f"{title}, {size}")
        if not (own["range"] == label).any():
            place.text(0.5, 0.5, "not profiled", transform=place.transAxes, ha="center", color=MUTED)
    axes[0].set_ylabel("time of a pass (ms)")
    axes[0].yaxis.set_major_locator(LogLocator(numticks=8))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[-1].legend(*axes[0].get_legend_handles_labels(), **LEGEND_BESIDE)
    if (own["range"] == "training").any():
        axes[-1].legend(*axes[-1].get_legend_handles_labels(), **LEGEND_BESIDE)
    return figure


def _context_axis(axes: Axes, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("context length")
    axes.margins(x=0.1)


def attention_figure(attention: pd.DataFrame, pairs: pd.DataFrame) -> Figure:
    """Parts of attention as shares of its time and of its FLOPs by context; softmax over matmuls by size and context.

    `attention` is `attention_rows`, `pairs` is `softmax_pairs` of it. The bars are of one size (`fullest_size`).
    """
    size, precision = fullest_size(attention, "seconds"), attention["precision"].iloc[0]
    own = attention[(attention["size"] == size) & (attention["precision"] == precision)]
    contexts = sorted(own["context_length"].unique())
    heights = (0.55 + 0.28 * len(contexts), 2.2)
    figure = Figure(figsize=(panels(1, 1, 1)[0].get_figwidth(), sum(heights) + 0.5))
    grid = figure.add_gridspec(2, 2, height_ratios=heights)
    bars = [figure.add_subplot(grid[0, 0])]
    bars.append(figure.add_subplot(grid[0, 1], sharey=bars[0]))
    for axes, (column, title) in zip(bars, (("share_of_time", "time"), ("share_of_flops", "FLOPs")), strict=True):
        for place, context in enumerate(contexts):
            shares = own[own["context_length"] == context].set_index("part")[column]
            _stacked(axes, place, [(shares.get(name, 0.0), color) for name, color in ATTENTION_COLORS.items()])
        _share_axis(axes, f"{title}, {size}")
    bars[0].set_yticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    bars[0].set_ylabel("context length")
    figure.get_layout_engine().set(hspace=0.12)  # the title below is not to sit on the ticks above
    bars[0].invert_yaxis()
    bars[1].tick_params(labelleft=False)
    _patches(bars[1], list(ATTENTION_COLORS), list(ATTENTION_COLORS.values()))
    _ratio_lines(figure.add_subplot(grid[1, :]), pairs[pairs["precision"] == precision])
    return figure


def _ratio_lines(axes: Axes, pairs: pd.DataFrame) -> None:
    """Time of the softmax over that of both matmuls by context, a line for each size; their FLOPs dashed."""
    groups = list(pairs.groupby("size", sort=False, dropna=False))
    for color, (size, rows) in zip(sequence_colors(len(groups)), groups, strict=True):
        rows = rows.sort_values("context_length")
        axes.plot(rows["context_length"], rows["time_ratio"], marker="o", markersize=4, color=color, label=f"{size}")
        axes.plot(rows["context_length"], rows["flop_ratio"], "--", color=color, linewidth=1)
    axes.plot([], [], "--", color=MUTED, linewidth=1, label="FLOPs")
    axes.axhline(1, color="black", linewidth=0.7)
    _context_axis(axes, sorted(pairs["context_length"].unique()))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("softmax / both matmuls")
    axes.set_title("softmax over matmuls: time solid, FLOPs dashed")
    axes.legend(**LEGEND_BESIDE)


def idle_figure(table: pd.DataFrame, precision: str = "fp32") -> Figure:
    """Time of the GPU from first kernel to last, busy and idle, as shares: a bar for each size and context."""
    chosen = table[(table["precision"] == precision) & table["inference_gpu_seconds"].notna()]
    contexts = sorted(chosen["context_length"].unique())
    sizes = list(dict.fromkeys(chosen["size"]))
    figure, (axes,) = panels(1, 2, 2.7, sharey=True)
    width = 0.8 / len(contexts)
    for own, (label, title) in zip(axes, PANELS.items(), strict=True):
        for place, (context, color) in enumerate(zip(contexts, sequence_colors(len(contexts)), strict=True)):
            rows = chosen[chosen["context_length"] == context].set_index("size")
            idle = (rows[f"{label}_idle_seconds"] / rows[f"{label}_gpu_seconds"]).reindex(sizes).astype(float)
            offset = (place - (len(contexts) - 1) / 2) * width
            own.bar(np.arange(len(sizes)) + offset, idle, width, color=color, label=f"{context:,}", linewidth=0)
        own.set_xticks(range(len(sizes)), sizes, rotation=35, ha="right", rotation_mode="anchor")
        own.set_title(title)
        own.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        own.grid(visible=False, axis="x")
    axes[0].set_ylabel("GPU idle")
    axes[-1].legend(title="context", **LEGEND_BESIDE)
    return figure
