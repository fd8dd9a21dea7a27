"""The timeline of one pass as a profiler's window shows it: ranges on the CPU above, the work they launched below."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lmcore.profiling.nsys.kinds import KINDS
from lmcore.workbook.report.figures import LEGEND_BESIDE, WIDTH, panels
from lmcore.workbook.report.nsys.figures import KIND_COLORS

RANGE_COLOR, EDGE_COLOR = "#dfe3ea", "#8a8f98"
SHORT = {
    "scaled dot product attention": "dot product",
    "computing attention scores": "scores",
    "computing softmax": "softmax",
    "final matmul": "final",
    "token embeddings": "emb",
    "optimizer": "opt.",
    "attention": "attn",
}
CHARACTER = 0.0105 * 6.6 / WIDTH
"""Width of a character of a label as a share of the axes."""

LANE = 0.26
"""Height of a lane of ranges in inches."""

TALL, WORK_HEIGHT = 2.0, 1.75
"""Height of a lane of work, and of work that runs all the time in it, in lanes of ranges."""

BINS = 400
"""Pieces of time of a whole pass, each about a pixel wide."""

THINNEST = 1500
"""Boxes of work are at least this part of the axes wide."""

COPIES = -1
"""The stream of memory copies in a timeline."""


def timeline_figure(timeline: Mapping[str, Any], gpu: bool = True) -> Figure:
    """A whole pass and, below it, one block of its forward pass; `timeline` is that of `profile_workload`.

    Upper lanes are the ranges on the CPU, nested by depth, lower ones the work by stream, colored by kind. The height
    of the work is the share of the time in which it ran: of the whole pass in `BINS` pieces of time, each in the color
    of the kind that took most of it. What is drawn below a range is what ran at that time; on a GPU it may have been
    launched earlier, by another one.
    """
    ranges, work = timeline["ranges"], timeline["work"]
    window = block_window(ranges)
    windows = [(0.0, timeline["seconds"])] + ([window] if window else [])
    depth = [min(4, _deepest(ranges)), _deepest(ranges)]
    lanes = _lanes(work, gpu)
    heights = [LANE * (deepest + TALL * len(lanes)) + 0.72 for deepest in depth[: len(windows)]]
    figure, grid = panels(len(windows), 1, sum(heights), height_ratios=heights)
    for number, ((axes,), (begin, end)) in enumerate(zip(grid, windows, strict=True)):
        deepest = depth[number]
        _draw_ranges(axes, [row for row in ranges if row["depth"] < deepest], begin, end)
        for place, stream in enumerate(lanes):
            own = [row for row in work if row["stream"] == stream and row["start"] < end and row["end"] > begin]
            bottom = -deepest - TALL * (place + 1) + 0.1
            (_draw_binned if number == 0 else _draw_single)(axes, own, bottom, begin, end)
        _finish(axes, begin, end, deepest, list(lanes.values()))
        share = busy_share(work, begin, end)
        what = "the whole pass" if number == 0 else "during one of its blocks"
        axes.set_title(f"{what}: {'GPU' if gpu else 'operators'} busy {share:.0%}" if work else what)
    _kinds_legend(grid[0][0], {row["kind"] for row in work})
    return figure


def busy_share(work: Sequence[Mapping[str, Any]], begin: float, end: float) -> float:
    """Share of the time from `begin` to `end` in which kernels ran, on any stream; copies do not count."""
    rows = [row for row in work if row["stream"] != COPIES]
    return float(binned(rows, begin, end).sum(axis=0).clip(max=1).mean())


def binned(work: Sequence[Mapping[str, Any]], begin: float, end: float, bins: int = BINS) -> np.ndarray:
    """Share of each of `bins` equal pieces of time that each kind ran: `KINDS` by bins; a piece of work that joins
    several kernels is spread evenly over its length."""
    edges = np.linspace(begin, end, bins + 1)
    shares = np.zeros((len(KINDS), bins))
    for row in work:
        length = row["end"] - row["start"]
        if length <= 0:
            continue
        overlap = np.minimum(edges[1:], row["end"]) - np.maximum(edges[:-1], row["start"])
        density = min(1.0, row["busy"] / length)
        shares[KINDS.index(row["kind"])] += overlap.clip(min=0) * density / (edges[1] - edges[0])
    return shares


def block_window(ranges: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Begin and end of the block in the middle of the forward pass; None where there are no blocks."""
    blocks = [row for row in ranges if row["name"].startswith("block ") and "/forward/" in row["path"]]
    if not blocks:
        return None
    block = blocks[len(blocks) // 2]
    return block["start"], block["end"]


def _deepest(ranges: Sequence[Mapping[str, Any]]) -> int:
    return max((row["depth"] for row in ranges), default=0) + 1


def _lanes(work: Sequence[Mapping[str, Any]], gpu: bool) -> dict[int, str]:
    """Streams with work, and their labels: kernels first, copies last."""
    streams = sorted({row["stream"] for row in work}, key=lambda stream: (stream == COPIES, stream))
    computing = [stream for stream in streams if stream != COPIES]
    labels = {stream: f"stream {stream}" if gpu and len(computing) > 1 else "GPU" for stream in computing}
    if not gpu:
        labels = {
            stream: "operators" if len(computing) == 1 else f"operators {n}" for n, stream in enumerate(computing, 1)
        }
    return labels | {stream: "memcpy" for stream in streams if stream == COPIES}


def _boxes(spans: Sequence[tuple[float, float]], bottom: float, height: float = 0.7) -> list:
    return [[(a, bottom), (b, bottom), (b, bottom + height), (a, bottom + height)] for a, b in spans]


def _draw_ranges(axes: Axes, ranges: Sequence[Mapping[str, Any]], begin: float, end: float) -> None:
    for row in ranges:
        first, last = max(row["start"], begin), min(row["end"], end)
        if last <= first:
            continue
        bottom = -row["depth"] - 0.85
        box = _boxes([(first, last)], bottom)
        axes.add_collection(PolyCollection(box, facecolor=RANGE_COLOR, edgecolor=EDGE_COLOR, linewidth=0.4))
        if (text := fitting(row["name"], (last - first) / (end - begin))) is not None:
            axes.text((first + last) / 2, bottom + 0.33, text, ha="center", va="center", fontsize=6.5, clip_on=True)


def fitting(name: str, share: float) -> str | None:
    """The longest form of a range's name that fits into a share of the axes' width; None where none does."""
    forms = [name, SHORT.get(name, name), name.removeprefix("block ")]
    return next((form for form in forms if (len(form) + 1) * CHARACTER <= share), None)


def _draw_binned(axes: Axes, work: Sequence[Mapping[str, Any]], bottom: float, begin: float, end: float) -> None:
    """Busy shares of the pieces of time; neighbours of one color are one polygon, which keeps a picture small."""
    shares = binned(work, begin, end)
    heights, kinds = shares.sum(axis=0).clip(max=1) * WORK_HEIGHT, shares.argmax(axis=0)
    edges = np.linspace(begin, end, BINS + 1)
    runs = np.flatnonzero(np.diff(np.where(heights > 0, kinds, -1), prepend=-2, append=-2))
    shapes: dict[int, list] = {}
    for first, last in pairwise(runs):
        if heights[first] > 0:
            sides = np.repeat(edges[first : last + 1], 2)
            tops = bottom + np.concatenate([[0], np.repeat(heights[first:last], 2), [0]])
            shapes.setdefault(int(kinds[first]), []).append(np.column_stack([sides, tops]))
    for kind, polygons in shapes.items():
        axes.add_collection(PolyCollection(polygons, facecolor=KIND_COLORS[KINDS[kind]], linewidth=0))


def _draw_single(axes: Axes, work: Sequence[Mapping[str, Any]], bottom: float, begin: float, end: float) -> None:
    """Every piece of work as a box; the shortest are as wide as a thin line."""
    thin = (end - begin) / THINNEST
    for kind in reversed(KINDS):  # on a CPU, operators that compute lie inside others that only call them
        boxes = []
        for row in (row for row in work if row["kind"] == kind):
            first, last = max(row["start"], begin), min(row["end"], end)
            density = min(1.0, row["busy"] / (row["end"] - row["start"])) if row["end"] > row["start"] else 1.0
            boxes += _boxes([(first, max(last, first + thin))], bottom, WORK_HEIGHT * density)
        if boxes:
            axes.add_collection(PolyCollection(boxes, facecolor=KIND_COLORS[kind], linewidth=0))


def _finish(axes: Axes, begin: float, end: float, deepest: int, lanes: Sequence[str]) -> None:
    axes.set_xlim(begin, end)
    axes.set_ylim(-deepest - TALL * len(lanes) - 0.05, 0.05)
    places = [-(deepest - 1) / 2 - 0.5] + [-deepest - TALL * (number + 0.5) for number in range(len(lanes))]
    axes.set_yticks(places, ["ranges\n(CPU)", *lanes])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.axhline(-deepest - 0.02, color=EDGE_COLOR, linewidth=0.6)
    scale, unit = (1e6, "µs") if end - begin < 2e-3 else (1e3, "ms")
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:,.4g}"))
    axes.set_xlabel(f"time since the pass began ({unit})")


def _kinds_legend(axes: Axes, kinds: set[str]) -> None:
    names = [kind for kind in KINDS if kind in kinds]
    handles = [axes.barh(0, 0, color=KIND_COLORS[name]) for name in names]
    axes.legend(handles, names, **LEGEND_BESIDE)
