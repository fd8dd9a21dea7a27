"""Figures hold the data that they were given and are saved as the same bytes every time."""

import base64
from itertools import combinations

import matplotlib.colors
import numpy as np
import pytest
from IPython.display import SVG
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lmcore.errors import UserError
from workbook.report.figures import PALETTE, Picture, save_figure, use_style
from workbook.report.notebook import token_label


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def schedule():
    """A figure as a notebook makes one."""
    figure = Figure(figsize=(6.6, 2.7))
    axes = figure.subplots()
    axes.plot([0, 1, 2, 3], [0.0, 1.0, 0.5, 0.0], label="cosine")
    axes.set(xlabel="step", ylabel="learning rate")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def test_saved_twice_it_is_the_same_file(tmp_path):
    first = save_figure(schedule(), tmp_path / "first.svg").read_bytes()
    second = save_figure(schedule(), tmp_path / "second.svg").read_bytes()
    assert first == second
    assert first.startswith(b"<?xml")
    assert b"<dc:date>" not in first
    assert b"<text" not in first  # text is drawn as paths: no font is needed to show it


def test_nothing_is_cut_off_at_the_edge():
    figure = schedule()
    FigureCanvasAgg(figure).draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_a_figure_that_cannot_be_saved_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Cannot write"):
        save_figure(schedule(), tmp_path / "file" / "figure.svg")


def test_what_is_shown_is_what_is_saved_with_its_caption(tmp_path):
    shown = Picture(save_figure(schedule(), tmp_path / "figure.svg"), "`steps` < 9.")
    data, metadata = shown._repr_svg_()
    assert data == SVG((tmp_path / "figure.svg").read_text()).data
    assert metadata == {"caption": "`steps` < 9."}
    page = shown._repr_html_()
    assert base64.b64decode(page.split("base64,")[1].partition('"')[0]).decode() == data
    assert page.endswith("<figcaption><em>Figure.</em> <code>steps</code> &lt; 9.</figcaption></figure>")


@pytest.mark.parametrize(("text", "label"), [(" the", "␣the"), ("\n", "\\n"), ("é", "é"), ("😀", "\\U0001f600")])
def test_token_labels_show_what_cannot_be_seen(text, label):
    assert token_label(text) == label


def lab(color, vision):
    """CIELAB coordinates of a color as seen with `vision`, a matrix over linear RGB."""
    red_green_blue = np.array(matplotlib.colors.to_rgb(color))
    linear = np.where(red_green_blue <= 0.04045, red_green_blue / 12.92, ((red_green_blue + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    x, y, z = np.cbrt(to_xyz @ np.clip(vision @ linear, 0.001, 1) / [0.9505, 1, 1.0888])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes 2009, severity 1
DEUTERANOPIA = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
PROTANOPIA = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])


@pytest.mark.parametrize("vision", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["all", "no_green", "no_red"])
def test_no_two_colors_of_the_palette_look_alike(vision):
    seen = [lab(color, vision) for color in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 20
    assert all(color[0] < 85 for color in seen), "too light on white"
