"""Figures of notebook 04 on mixed precision."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from lmcore.profiling.precision import ROUNDED, RUNNING, WIDENED
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels

PRECISIONS = ("fp16", "bf16", "fp32")
STYLES = {RUNNING: ":", ROUNDED: "-", WIDENED: "--"}


def accumulation_figure(course: pd.DataFrame) -> Figure:
    """Error of the partial sums of a thousand hundredths: all experiments, and enlarged those that stay closest.

    `course` is `lmcore.profiling.precision.accumulation_course`. Experiments that agree throughout share a line.
    """
    figure, ((whole, close),) = panels(1, 2, 2.7)
    lines: dict[tuple, list] = {}
    for (number, label), part in course.groupby(["experiment", "label"], sort=False):
        lines.setdefault(tuple(part["error"]), []).append((number, label))
    worst = max(lines, key=lambda errors: np.abs(errors).max(), default=())
    for color, (errors, names) in zip(category_colors(len(lines)), lines.items(), strict=True):
        text = " and ".join(str(number) for number, _ in names) + f": {names[0][1]}"
        whole.plot(errors, color=color, label=text)
        if errors != worst:
            close.plot(errors, color=color)
    for axes, title in ((whole, "all experiments"), (close, "without the worst")):
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.set_title(title)
        axes.set(xlabel="additions of 0.01")
    whole.set(ylabel="sum less its true value")
    close.legend(*whole.get_legend_handles_labels(), **LEGEND_BESIDE)
    return figure


def layer_norm_figure(norms: pd.DataFrame) -> Figure:
    """Relative error of layer norm's output by scale and by offset of its inputs; a cross: the variance overflowed.

    `norms` is `lmcore.profiling.precision.layer_norm_table`.
    """
    figure, ((scales, offsets),) = panels(1, 2, 3.0, sharey=True)
    colors = dict(zip(PRECISIONS, category_colors(len(PRECISIONS)), strict=True))
    for precision, color in colors.items():
        for method, style in STYLES.items():
            rows = norms[(norms["precision"] == precision) & (norms["method"] == method)]
            _error_line(scales, rows[rows["offset"] == 0], "scale", color, style)
            _error_line(offsets, rows[rows["scale"] == 1], "offset", color, style)
    scales.set_xscale("log", base=2)
    scales.set(xlabel="standard deviation of the inputs", ylabel="relative error of the output", yscale="log")
    scales.yaxis.set_major_locator(LogLocator(numticks=12))
    scales.yaxis.set_minor_formatter(NullFormatter())
    offsets.set_xscale("symlog", base=2, linthresh=1)
    ticks = sorted(norms.loc[norms["scale"] == 1, "offset"].unique())
    offsets.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    offsets.set(xlabel="their mean (standard deviations)")
    handles = [Line2D([], [], color=color, label=name) for name, color in colors.items()]
    handles += [Line2D([], [], color="black", linestyle=style, label=name) for name, style in STYLES.items()]
    handles.append(Line2D([], [], color=WARNING, marker="X", linestyle="", markersize=6, label="overflow"))
    offsets.legend(handles=handles, **LEGEND_BESIDE)
    return figure


def _error_line(axes: Axes, rows: pd.DataFrame, x: str, color, style: str) -> None:
    """A line as far as the variance is finite, and a cross at the first point where it is not."""
    rows = rows.sort_values(x)
    lost = rows["overflow"].eq(True) | ~np.isfinite(rows["error"].astype(float))
    axes.plot(rows.loc[~lost, x], rows.loc[~lost, "error"], color=color, linestyle=style)
    if lost.any():
        axes.plot(rows.loc[lost, x].iloc[0], 1, "X", color=WARNING, markersize=6, zorder=3, clip_on=False)
