"""A profiler's timeline of one pass, as a figure."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.textpath import TextPath

FONT_SIZE = 5.5

MARGIN = 1.5
"""Space on each side of a range's name, in points."""


def draw_timeline(ranges_axes: Axes, work_axes: Axes, ranges: pd.DataFrame, shares: pd.DataFrame, colors: Mapping):
    """Draws ranges (name, start, end, depth; in seconds) on one axes, and on another the device's busy shares.

    `shares` has a column for each kernel category that is drawn, all of them in `colors`, and as its index the middles
    of equal pieces of time, which say what window is drawn. A name is cut to its last word, or left out, where there is
    no room for it; names of one depth that begin alike ("block 1", "block 2") are cut together.
    """
    half = (shares.index[1] - shares.index[0]) / 2
    begin, end = shares.index[0] - half, shares.index[-1] + half
    spans = ranges[(ranges["end"] > begin) & (ranges["start"] < end)]
    spans = spans.assign(left=spans["start"].clip(lower=begin), right=spans["end"].clip(upper=end))
    points = ranges_axes.bbox.width * 72 / ranges_axes.figure.dpi
    spans["label"] = labels(spans.assign(room=(spans["right"] - spans["left"]) / (end - begin) * points))
    for span in spans.itertuples():
        width = span.right - span.left
        ranges_axes.barh(span.depth, width, left=span.left, color="#dfe3ea", edgecolor="#8a8f98", linewidth=0.4)
        ranges_axes.text(span.left + width / 2, span.depth, span.label, ha="center", va="center", fontsize=FONT_SIZE)
    drawn = [colors[name] for name in shares]
    work_axes.stackplot(1e3 * shares.index, shares.T, colors=drawn, labels=[*shares], step="mid", linewidth=0)
    ranges_axes.set(xlim=(begin, end), xticks=[], yticks=[], ylabel="ranges")
    work_axes.set(xlim=(1e3 * begin, 1e3 * end), ylim=(0, 1), ylabel="busy", xlabel="time (ms)")
    work_axes.yaxis.set_major_formatter("{x:.0%}")
    ranges_axes.invert_yaxis()
    ranges_axes.grid(visible=False)


def labels(spans: pd.DataFrame) -> pd.Series:
    """For each range (name, depth, and `room` in points) what is written on it: its name, its last word, or nothing."""
    words = spans["name"].str.split()
    short, first = words.str[-1], words.str[0]
    short_fits, fits = (
        pd.Series([fitting(*pair) for pair in zip(names, spans["room"], strict=True)], spans.index, dtype=bool)
        for names in (short, spans["name"])
    )
    whole = (fits | ~short_fits).groupby([spans["depth"], first]).transform("all")
    return spans["name"].where(whole & fits, short.where(short_fits, ""))


def fitting(text: str, room: float) -> bool:
    """Whether a text has its margins in so many points."""
    return TextPath((0, 0), text, size=FONT_SIZE).get_extents().width + 2 * MARGIN <= room
