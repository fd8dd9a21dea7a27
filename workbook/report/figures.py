"""Figures of the workbook, and how they look. A figure is made from tables and saved as the same SVG every time."""

import base64
import html
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import seaborn
from IPython.display import SVG
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmcore.files import atomic_write

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

PALETTE = ["#0072B2", "#D55E00", "#44AA99", "#5D3FD3", "#F0C000", "#882255", "#88CCEE", "#CA9161", "#222222"]
"""Colors of lines and bars, in this order; no two look alike, to a color-blind reader either."""

# text as paths: neither a browser nor Typst needs the font; identifiers from a fixed salt
SVG_STYLE = {"svg.hashsalt": "lmcore", "svg.fonttype": "path"}


def use_style() -> None:
    """Sets matplotlib up for this module's figures; to be called once, before the first of them."""
    seaborn.set_theme(context="paper", style="whitegrid", palette=PALETTE, rc=STYLE | SVG_STYLE)


def save_figure(figure: Figure, path: str | os.PathLike, **options: Any) -> Path:
    """Writes `figure` as SVG, atomically: no date, fixed identifiers, so that equal figures are equal files."""
    with matplotlib.rc_context(SVG_STYLE), atomic_write(path) as file:
        figure.savefig(file, format="svg", metadata={"Date": None}, **options)
    return Path(path)


class Picture(SVG):
    """A saved figure for a notebook: the picture, and as HTML the picture above its caption, as JupyterLab shows it."""

    def __init__(self, path: Path, caption: str):
        super().__init__(path.read_text(encoding="utf-8"), metadata={"caption": caption})
        self.caption = caption

    def _repr_html_(self) -> str:
        encoded = base64.b64encode(self.data.encode()).decode()
        words = html.escape(self.caption)
        shown = re.sub(r"`([^`]*)`", r"<code>\1</code>", words)
        picture = f'<img alt="{words}" src="data:image/svg+xml;base64,{encoded}">'
        return f"<figure style='margin: 0.5em 0'>{picture}<figcaption><em>Figure.</em> {shown}</figcaption></figure>"


def label_ends(ax: Axes, ends: Mapping[str, tuple[float, Any]]) -> None:
    """Names beside the right ends of lines, moved apart where they would overlap; to be called when all is drawn.

    `ends` has the last value and the color of each line by its name; a value that is NaN has no label.
    """
    ax.autoscale_view()  # to the limits that the figure will have
    gap, lowest, left = 0.11, -np.inf, ax.get_xlim()[0]
    named = sorted((value, name, color) for name, (value, color) in ends.items() if np.isfinite(value))
    for index, (value, name, color) in enumerate(named, 1):
        height = ax.transAxes.inverted().transform(ax.transData.transform((left, value)))[1]
        lowest = min(max(height, lowest + gap), 1 - gap * (len(named) - index))  # the topmost within the axes
        ax.annotate(name, (1.02, lowest), xycoords="axes fraction", color=color, va="center", fontsize=8)
