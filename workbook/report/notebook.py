"""What every notebook of the workbook begins with: where results go, how figures look, which device computes."""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML, Code, display
from matplotlib.figure import Figure

from lmcore.device import select_device
from lmcore.progress import in_jupyter
from workbook.exercises.checking import begin
from workbook.knobs import knobs
from workbook.report.answers import answer, escaped, table
from workbook.report.figures import Picture, save_figure, use_style
from workbook.report.results import Results

__all__ = ["answer", "knobs", "quote", "show_source", "start", "table", "token_label"]

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""Settings of glibc's malloc for the processes of benchmark cases."""

DARK_THEME = """<style>body[data-jp-theme-light="false"] .jp-OutputArea-output img {
  filter: invert(0.92) hue-rotate(180deg); }</style>"""
"""In JupyterLab's dark theme, figures are shown as on dark pages: lightness turned over, hues kept."""


def start(
    out: str, scale: str, records: str = "", device: str = "auto"
) -> tuple[Results, Callable[[Figure, str, str], Picture], torch.device]:
    """Results of a notebook, its function `show(figure, name, caption)`, and the device that computes.

    On a CPU, models at smoke scale compute with one thread, here and in the processes of benchmark cases: more would
    wait for each other. Freed memory is kept, since fresh pages cost more than small operations on them.
    `show` saves a figure as out/figures/<name>.svg and returns the picture for the cell, with its caption.
    """
    use_style()
    plt.rcParams["figure.constrained_layout.use"] = False  # seaborn's grids have a layout of their own
    chosen, reason = select_device(device)
    if chosen.type == "cpu":
        for name, value in KEEP_MEMORY.items():
            os.environ.setdefault(name, value)
        if scale == "smoke":
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            torch.set_num_threads(1)
    source = f"results are those of {Path(records).name}" if records else f"{chosen.type} computes, because {reason}"
    print(f"Scale {scale}; {source}.")

    def show(figure: Figure, name: str, caption: str) -> Picture:
        saved = save_figure(figure, Path(out) / "figures" / f"{name}.svg", bbox_inches="tight")
        plt.close(figure)  # or the notebook shows it a second time
        return Picture(saved, caption)

    if in_jupyter():
        display(HTML(DARK_THEME))
    begin(out)
    return Results(out, records), show, chosen


def show_source(*objects: Any) -> Code:
    """The library's own code in a notebook: the source of functions, classes or modules."""
    return Code("\n\n".join(inspect.getsource(shown).rstrip() for shown in objects), language="python")


def quote(text: str, heading: str) -> str:
    """Sampled text under a heading as a Markdown block quote, with all that could be read as markup escaped."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    paragraphs = [
        re.sub(r" *\n *", "\\\\\n> ", part.strip()) for part in re.split(r"\n\s*\n", escaped(shown)) if part.strip()
    ]
    return "> " + "\n>\n> ".join([f"**{heading}**", *(paragraphs or ["&nbsp;"])])


def token_label(text: str) -> str:
    """A token's text for an axis: spaces visible, and what fonts may not have as an escape."""
    shown = (c if c.isprintable() and ord(c) < 0x250 else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).replace(" ", "\N{OPEN BOX}")
