"""The roofline of one device (Williams, Waterman and Patterson 2009): each component below its measured roof."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from lmcore.workbook.report.answers import format_significant
from lmcore.workbook.report.benchmark.views import rate
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, category_colors, panels

MARKERS = {"matmul": "o", "elementwise": "s", "whole": "D"}
AROUND = [
    radius * np.array((np.cos(angle), np.sin(angle)))
    for radius in (10, 17, 25, 34)
    for angle in np.arange(0, 2 * np.pi, np.pi / 6)
]
"""Places of a number around its point, in points, the nearest first."""


def roofline_figure(components: pd.DataFrame) -> Figure:
    """Achieved FLOP/s by FLOPs per byte of each component of one cell; the roof is a large product and a large copy.

    Components have numbers, which the legend resolves: their names would cover each other.
    """
    points = components[components["direction"] != "forward + backward"].sort_values("intensity")
    figure, ((axes,),) = panels(1, 1, 4.7)
    if not len(points):
        return figure
    peak, bandwidth = points[["peak_flops_per_second", "peak_bytes_per_second"]].iloc[0].astype(float)
    ridge = peak / bandwidth
    low, high = min(points["intensity"].min(), ridge) / 3, max(points["intensity"].max(), ridge) * 4
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(peak, x * bandwidth), color="black", linewidth=1.4)
    axes.axvline(ridge, color=MUTED, linewidth=0.8, linestyle=":")
    colors = dict(zip(MARKERS, category_colors(len(MARKERS)), strict=True))
    for number, row in enumerate(points.to_dict("records"), 1):
        spot = (row["intensity"], row["flops_per_second"])
        style = {"color": colors[row["kind"]], "markersize": 5.5, "linestyle": "none"}
        axes.plot(*spot, MARKERS[row["kind"]], label=f"{number}  {row['component']}", **style)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte that must move", ylabel="achieved FLOP/s")
    axes.set_xlim(low, high)
    bottom = points["flops_per_second"].min() / 3
    axes.set_ylim(bottom, 3 * max(peak, points["flops_per_second"].max()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    roof = f"large product {rate(peak)}\nlarge copy {format_significant(bandwidth / 1e9)} GB/s"
    kinds = "circle: matrix product\nsquare: elementwise\ndiamond: as a whole"
    axes.legend(title=f"roof:\n{roof}\n\n{kinds}", **LEGEND_BESIDE)
    _numbers(axes, points)
    return figure


def _numbers(axes: Axes, points: pd.DataFrame) -> None:
    """The number of each point beside it, at the nearest place that no point and no other number covers."""
    axes.figure.draw_without_rendering()  # the layout is known only then
    spots = axes.transData.transform(points[["intensity", "flops_per_second"]].astype(float).to_numpy())
    spots = spots * 72 / axes.figure.dpi
    taken: list[np.ndarray] = []
    for number, spot in enumerate(spots, 1):
        for place in AROUND:
            at = spot + place
            if all(np.abs(at - other).max() > 8 for other in [*taken, *spots]):
                break
        taken.append(at)
        x, y = points.iloc[number - 1][["intensity", "flops_per_second"]]
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": MUTED, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            str(number), (x, y), tuple(place), textcoords="offset points", fontsize=8, ha="center", va="center",
            arrowprops=line if np.abs(place).max() > 12 else None,
        )  # fmt: skip


def _tick(value: float) -> str:
    return f"{value / 1e12:g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:g} GFLOP/s"
