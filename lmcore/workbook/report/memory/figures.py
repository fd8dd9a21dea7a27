"""Figures of notebook 06: active memory timelines, peaks, what they are made of, and what a block keeps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lmcore.profiling.memory.timeline import CATEGORIES
from lmcore.profiling.workload import WorkloadConfig
from lmcore.workbook.report.answers import format_bytes
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels

CATEGORY_COLORS = {
    "parameters": "#0173b2",
    "optimizer state": "#56b4e9",
    "other": "#949494",
    "gradients": "#de8f05",
    "activations": "#029e73",
    "temporary": "#cc78bc",
    "unknown": "#ca9161",
}
"""One color for a category in every figure, told apart also by color-blind readers."""

PASSES = {"forward": "forward pass", "forward_backward": "forward and backward pass", "train_step": "training step"}
"""Passes of a cell, for readers."""

POINTS = 350
"""Moments of a drawn timeline: more make the file larger than the picture sharper."""

RASTER_DPI = 220
"""Resolution of the outlines of single allocations, which are no vectors."""

BYTE_STEPS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "bytes"))


def timeline_figure(profiles: Mapping[str, Mapping[str, Any]], detail: float = 0.005) -> Figure:
    """Active memory timelines below each other, each with its own axes: `profiles` maps titles to profiles.

    Stacked by category over the sequence of allocations and frees, stages marked, the peak dotted. Allocations of at
    least the share `detail` of the peak are outlined one by one, as memory_viz does above its detail threshold.
    """
    figure, grid = panels(len(profiles), 1, 2.75 * len(profiles) + 0.3)
    figure.set_dpi(RASTER_DPI)
    for axes, (title, profile) in zip(grid[:, 0], profiles.items(), strict=True):
        _timeline(axes, profile, detail)
        axes.set_title(title, loc="left", pad=24)
    grid[-1, 0].set_xlabel("allocations and frees, in order")
    shown = [n for n in CATEGORY_COLORS if any(max(p["timeline"]["bytes"].get(n, [0])) for p in profiles.values())]
    handles = [grid[0, 0].fill_between([0], [0], color=CATEGORY_COLORS[name], label=name) for name in reversed(shown)]
    grid[0, 0].legend(handles=handles, **LEGEND_BESIDE)
    return figure


def _timeline(axes: Axes, profile: Mapping[str, Any], detail: float) -> None:
    timeline, unit = profile["timeline"], byte_unit(profile["peak_bytes"])
    levels = np.array([timeline["bytes"][name] for name in profile["categories"]], dtype=float)
    kept = np.union1d(0, thinned_points(timeline["event"], levels.sum(axis=0), POINTS))
    events = np.append(np.array(timeline["event"])[kept], profile["events"])
    levels = np.append(levels[:, kept], levels[:, -1:], axis=1)
    tops = np.cumsum(levels, axis=0)
    for index, name in enumerate(profile["categories"]):
        if levels[index].any():
            low, top = tops[index] - levels[index], tops[index]
            steps = changing(low, top)
            axes.fill_between(
                events[steps], low[steps] / unit[0], top[steps] / unit[0], step="post",
                color=CATEGORY_COLORS[name], linewidth=0,
            )  # fmt: skip
    outlines = allocation_outlines(profile, events, tops - levels, detail)
    axes.add_collection(
        PolyCollection(
            [outline / (1, unit[0]) for outline in outlines],
            facecolors="none",
            edgecolors="white",
            linewidths=0.3,
            alpha=0.6,
            rasterized=True,  # hundreds of them, each with a step wherever something below it comes or goes
        )
    )
    _mark_stages(axes, profile)
    peak = profile["peak_bytes"] / unit[0]
    axes.plot(profile["peak_event"], peak, "o", color=WARNING, markersize=4, zorder=5, clip_on=False)
    axes.axhline(peak, color=WARNING, linewidth=0.8, linestyle=":")
    right = profile["peak_event"] < profile["events"] / 2
    axes.annotate(
        f"peak {format_bytes(profile['peak_bytes'])}", (1 if right else 0, peak), (-3 if right else 3, 3),
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right" if right else "left",
        color=WARNING, fontsize=8,
    )  # fmt: skip
    axes.set(ylabel=f"allocated ({unit[1]})", xlim=(events[0], profile["events"]), ylim=(0, 1.14 * peak))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(visible=False)


def changing(*levels: np.ndarray) -> np.ndarray:
    """Which points of a stepwise line are needed: where a level is not that before it, and the last."""
    needed = np.any([np.diff(level, prepend=np.nan) != 0 for level in levels], axis=0)
    needed[-1] = True
    return needed


def _mark_stages(axes: Axes, profile: Mapping[str, Any]) -> None:
    """A line where each stage begins and ends, and its name above."""
    place = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "fontsize": 8, "color": "#555555"}
    for stage in profile["stages"]:
        for edge in (stage["first_event"], stage["last_event"]):
            axes.axvline(edge, color=MUTED, linewidth=0.7, linestyle="--")
        middle, wide = (stage["first_event"] + stage["last_event"]) / 2, stage["last_event"] - stage["first_event"]
        # names of short stages stand a line higher, where they are not in the way of their neighbors
        height = 3 if wide > 0.12 * profile["events"] else 12
        axes.annotate(stage["name"], (middle, 1), (0, height), ha="center", **place)


def thinned_points(events: Sequence[int], totals: Sequence[float], count: int) -> np.ndarray:
    """Indices of at most `count` points, one for each equal part of the timeline: that of its highest total."""
    events, totals = np.asarray(events), np.asarray(totals)
    span = max(int(events[-1] - events[0]), 1)
    part = np.minimum((events - events[0]) * count // span, count - 1)
    order = np.lexsort((events, -totals, part))
    firsts = np.unique(part[order], return_index=True)[1]
    return np.sort(order[firsts])


def allocation_outlines(
    profile: Mapping[str, Any], events: np.ndarray, bases: np.ndarray, detail: float
) -> list[np.ndarray]:
    """Polygons, (points, 2) in events and bytes, of the listed allocations of at least `detail` times the peak.

    Within a category they lie on one another in the order in which they were made, from `bases` (category, event) up;
    what lies below is freed earlier or later, so that a polygon has steps.
    """
    least = detail * profile["peak_bytes"]
    outlines = []
    for index, name in enumerate(profile["categories"]):
        floor = bases[index].copy()
        for row in sorted(profile["allocations"], key=lambda row: row["first_event"]):
            if row["category"] != name or row["bytes"] < least:
                continue
            ends = row["last_event"] if row["last_event"] < profile["events"] else math.inf
            alive = np.flatnonzero((row["first_event"] <= events) & (events < ends))
            if len(alive) > 1:
                outlines.append(_steps(events[alive], floor[alive], row["bytes"]))
            floor[alive] += row["bytes"]
    return outlines


def _steps(events: np.ndarray, floor: np.ndarray, height: float) -> np.ndarray:
    """A band of one height above a floor that is constant between changes."""
    changes = np.flatnonzero(np.diff(floor, prepend=np.nan) != 0)
    x = np.repeat(np.append(events[changes], events[-1]), 2)[1:-1]
    y = np.repeat(floor[changes], 2)
    return np.concatenate([np.column_stack([x, y]), np.column_stack([x, y + height])[::-1]])


def byte_unit(largest: float) -> tuple[float, str]:
    """Divisor and name of the decimal unit that suits an axis up to `largest` bytes."""
    return next((step for step in BYTE_STEPS if largest >= step[0]), BYTE_STEPS[-1])


def peaks_figure(peaks: pd.DataFrame) -> Figure:
    """Peak by context, for each size and kind of passes a panel: bars by precision, the prediction as a black line.

    A red cross stands where a cell ran out of memory.
    """
    sizes, passes = list(dict.fromkeys(peaks["size"])), list(dict.fromkeys(peaks["passes"]))
    figure, grid = panels(len(sizes), len(passes), 2.3 * len(sizes) + 0.3)
    precisions, contexts = list(dict.fromkeys(peaks["precision"])), sorted(peaks["context_length"].unique())
    for (row, size), (column, how_far) in ((r, c) for r in enumerate(sizes) for c in enumerate(passes)):
        axes = grid[row, column]
        _peak_bars(axes, peaks[(peaks["size"] == size) & (peaks["passes"] == how_far)], precisions, contexts)
        axes.set_title(f"{size}: {PASSES.get(how_far, how_far)}", loc="left")
        if row == len(sizes) - 1:
            axes.set_xlabel("context length")
    order = {}
    for axes in grid.flat:
        handles, labels = axes.get_legend_handles_labels()
        order |= dict(zip(labels, handles, strict=True))
    grid[0, -1].legend(order.values(), order.keys(), **LEGEND_BESIDE)
    return figure


def _peak_bars(axes: Axes, cells: pd.DataFrame, precisions: Sequence[str], contexts: Sequence[int]) -> None:
    largest = np.nanmax([*cells["peak_bytes"].astype(float), *cells["predicted_bytes"].astype(float), 1.0])
    unit, width = byte_unit(largest), 0.8 / len(precisions)
    for number, (precision, color) in enumerate(zip(precisions, category_colors(len(precisions)), strict=True)):
        part = cells[cells["precision"] == precision].set_index("context_length")
        places = [contexts.index(context) + (number - (len(precisions) - 1) / 2) * width for context in part.index]
        measured = part["peak_bytes"].astype(float).fillna(0) / unit[0]
        axes.bar(places, measured, 0.92 * width, color=color, label=precision)
        label = "predicted" if number == len(precisions) - 1 else None
        predicted = part["predicted_bytes"].astype(float) / unit[0]
        half = 0.46 * width
        axes.hlines(predicted, np.array(places) - half, np.array(places) + half, "black", linewidth=1.6, label=label)
        lost = [place for place, outcome in zip(places, part["outcome"], strict=True) if outcome == "out of memory"]
        if lost:
            axes.plot(lost, [0.02] * len(lost), "X", color=WARNING, markersize=8, clip_on=False, label="out of memory",
                      transform=axes.get_xaxis_transform(), linestyle="none")  # fmt: skip
    axes.set(ylabel=f"peak ({unit[1]})", ylim=(0, 1.12 * largest / unit[0]))
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.grid(visible=False, axis="x")


def composition_figure(composition: pd.DataFrame) -> Figure:
    """What the memory holds at the peak of each profiled cell: bars stacked by category, the predicted one beside each.

    Below each pair stands its cell. The predicted bar is the paler one.
    """
    cells = list(dict.fromkeys(composition["cell"]))
    figure, ((axes,),) = panels(1, 1, 0.75 + 0.55 * len(cells))
    unit = byte_unit(composition.groupby("cell")["bytes"].sum().max())
    for number, cell in enumerate(cells):
        rows = composition[composition["cell"] == cell].set_index("category")
        for column, shift, alpha in (("bytes", -0.2, 1.0), ("predicted_bytes", 0.2, 0.5)):
            left = 0.0
            for name in CATEGORIES:
                value = float(rows.loc[name, column]) / unit[0]
                label = name if number == 0 and column == "bytes" else None
                color = CATEGORY_COLORS[name]
                axes.barh(number + shift, value, 0.36, left=left, color=color, alpha=alpha, label=label, linewidth=0)
                left += value
    axes.set_yticks(range(len(cells)), [cell_label(composition, cell) for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes at the peak ({unit[1]}); above measured, below predicted (paler)")
    axes.grid(visible=False, axis="y")
    axes.legend(**LEGEND_BESIDE)
    return figure


def cell_label(table: pd.DataFrame, cell: str) -> str:
    """Two lines that say what a cell is."""
    row = table[table["cell"] == cell].iloc[0]
    return f"{row['size']}, context {row['context_length']:,}\n{PASSES[row['passes']]}, {row['precision']}"


def kept_figure(kept: pd.DataFrame) -> Figure:
    """What one block keeps for the backward pass by operation: measured bars, the prediction as a black line.

    A panel for each `variant` of the model; rows of `kept` are in the order of the operations.
    """
    kept = kept.astype({"bytes": float, "predicted_bytes": float})
    variants = list(dict.fromkeys(kept["variant"]))
    rows = [kept[kept["variant"] == variant] for variant in variants]
    height = 0.9 + sum(0.45 + 0.17 * len(part) for part in rows)
    ratios = [len(part) + 1 for part in rows]
    figure, grid = panels(len(rows), 1, height, height_ratios=ratios, sharex=True)
    unit = byte_unit(max(kept["bytes"].max(), kept["predicted_bytes"].max()))
    for axes, variant, part in zip(grid[:, 0], variants, rows, strict=True):
        places = np.arange(len(part))
        axes.barh(places, part["bytes"] / unit[0], 0.7, color=CATEGORY_COLORS["activations"], label="measured")
        axes.vlines(part["predicted_bytes"] / unit[0], places - 0.42, places + 0.42, "black", linewidth=1.8,
                    label="predicted")  # fmt: skip
        axes.set_yticks(places, part["operation"])
        axes.set_ylim(len(part) - 0.4, -0.6)
        total = format_bytes(part["bytes"].sum()) if part["bytes"].notna().all() else "not measured"
        axes.set_title(f"{variant}: {total}", loc="left")
        axes.grid(visible=False, axis="y")
    grid[0, 0].legend(**LEGEND_BESIDE)
    grid[-1, 0].set_xlabel(f"kept by one block ({unit[1]})")
    return figure


def titled(profiles: Mapping[str, Mapping[str, Any]], cells: Mapping[str, WorkloadConfig]) -> dict[str, Any]:
    """Profiles of cells by titles for readers: "large, training step, context 128, fp32"."""
    titles = {}
    for name, profile in profiles.items():
        c = cells[name]
        titles[f"{c.size}, {PASSES[c.passes]}, context {c.model.context_length:,}, {c.precision}"] = profile
    return titles
