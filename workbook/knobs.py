"""Knobs: a picture that follows sliders in JupyterLab, and stands still elsewhere."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from inspect import iscode
from io import BytesIO
from types import FunctionType
from typing import Any

import ipywidgets
import numpy as np
import PIL.Image
from IPython.display import Image, display
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lmcore.progress import in_jupyter

DPI, SHOWN_DPI = 150, 100
"""Pixels of a picture for each inch, and CSS pixels: text is sharp on screens of high resolution, too."""


def as_png(canvas: FigureCanvasAgg, **options: Any) -> Image:
    """What was drawn on a canvas as a picture for a notebook."""
    shown, file = PIL.Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"), BytesIO()
    shown.save(file, "png", compress_level=1, compress_type=zlib.Z_RLE)
    return Image(file.getvalue(), width=round(SHOWN_DPI * canvas.figure.get_figwidth()), **options)


def knobs(draw: Callable, columns: int = 1, figsize: tuple = (4.8, 2.6), **choices: Iterable) -> None:
    """Shows what `draw(*axes, **values)` draws on axes, empty but for ticks and labels, below a slider for each choice.

    A choice is a list of values that begins with the default. Only a kernel that JupyterLab has started for a notebook
    has sliders (`lmcore.progress.in_jupyter`). Under papermill, nbconvert and nbval, and so on the pages, the defaults'
    picture is all: a PNG, and no widget. What `draw` uses keeps its value when a later cell takes the name.
    """
    codes, names = [draw.__code__, *filter(iscode, draw.__code__.co_consts)], draw.__globals__
    used = {name: names[name] for code in codes for name in code.co_names if name in names}
    draw = FunctionType(draw.__code__, used, draw.__name__, draw.__defaults__, draw.__closure__)
    figure, frame, background = Figure(figsize, layout="constrained", dpi=DPI), None, None
    axes, canvas = figure.subplots(1, columns, squeeze=False)[0], FigureCanvasAgg(figure)

    def picture(**values: Any) -> Image:
        nonlocal frame, background
        for artist in [*artists()]:
            artist.remove()  # not ax.clear(): making new ticks takes half of the time
        for ax in axes:
            ax.set_prop_cycle(None)
            ax.relim()
        draw(*axes, **values)
        drawn = sorted([*artists(), *(ax.title for ax in axes)], key=lambda artist: artist.zorder)
        for artist in drawn:
            artist.set_animated(True)  # not of the background: ticks and labels, drawn when they change
        if frame != (frame := [(*ax.get_xlim(), *ax.get_ylim(), ax.get_xlabel(), ax.get_ylabel()) for ax in axes]):
            canvas.draw()
            figure.set_layout_engine("none")  # from then on the axes keep their places
            background = canvas.copy_from_bbox(figure.bbox)
        canvas.restore_region(background)
        for artist in drawn:
            artist.axes.draw_artist(artist)
        return as_png(canvas, alt=draw.__doc__)

    def artists() -> Iterator[Artist]:
        for ax in axes:
            yield from (*ax.collections, *ax.images, *ax.lines, *ax.patches, *ax.texts, *filter(None, [ax.legend_]))

    values = {name: [*choice] for name, choice in choices.items()}
    still = picture(**{name: value for name, (value, *_) in values.items()})
    if not in_jupyter():
        return display(still)
    form = {"style": {"description_width": "7em"}, "layout": {"width": "27em"}}
    sliders = {
        name: ipywidgets.SelectionSlider(options=sorted({*choice}), value=choice[0], description=name, **form)
        for name, choice in values.items()
    }
    shown = ipywidgets.Image(value=still.data, layout={"width": f"{still.width}px"})

    def redraw(_: Any) -> None:
        shown.value = picture(**{name: slider.value for name, slider in sliders.items()}).data

    for slider in sliders.values():
        slider.observe(redraw, "value")
    return display(ipywidgets.VBox([*sliders.values(), shown]))
