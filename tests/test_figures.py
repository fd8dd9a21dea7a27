"""Figures hold the data that they were given and are saved as the same bytes every time."""

import base64

import pytest
from IPython.display import SVG
from matplotlib.figure import Figure

from workbook.report.figures import Picture, save_figure, use_style
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
