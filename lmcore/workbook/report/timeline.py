"""A profiler's timeline of one pass, as a figure."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

LETTER = 0.012
"""Width of a letter of a range's name, with its part of the margins, as a share of the axes."""


def draw_timeline(ranges_axes: Axes, work_axes: Axes, ranges: pd.DataFrame, shares: pd.DataFrame, colors: Mapping):
    """Draws ranges (name, start, end, depth; in seconds) on one axes, and on another the device's busy shares.

    `shares` has a column for each kernel category, in `colors`, and as its index the middles of equal pieces of time,
    which say what window is drawn. A name is cut to its last word, or left out, where there is no room for it.
    """
    half = (shares.index[1] - shares.index[0]) / 2
    begin, end = shares.index[0] - half, shares.index[-1] + half
    for span in ranges[(ranges["end"] > begin) & (ranges["start"] < end)].itertuples():
        left, right = max(span.start, begin), min(span.end, end)
        ranges_axes.barh(span.depth, right - left, left=left, color="#dfe3ea", edgecolor="#8a8f98", linewidth=0.4)
        room = (right - left) / (end - begin) / LETTER
        label = next((text for text in (span.name, span.name.split()[-1]) if len(text) < room), "")
        ranges_axes.text((left + right) / 2, span.depth, label, ha="center", va="center", fontsize=6)
    drawn = [colors[name] for name in shares]
    work_axes.stackplot(1e3 * shares.index, shares.T, colors=drawn, labels=[*shares], step="mid", linewidth=0)
    ranges_axes.set(xlim=(begin, end), xticks=[], yticks=[], ylabel="ranges")
    work_axes.set(xlim=(1e3 * begin, 1e3 * end), ylim=(0, 1), ylabel="busy", xlabel="time (ms)")
    work_axes.yaxis.set_major_formatter("{x:.0%}")
    ranges_axes.invert_yaxis()
    ranges_axes.grid(visible=False)
