"""Figures hold the data that they were given and are saved as the same bytes every time."""

import pytest
from IPython.display import SVG
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lmcore.errors import UserError
from lmcore.workbook.report.figures import LEGEND_BESIDE, panels, save_figure, show_figure, use_style
from lmcore.workbook.report.notebook import token_label


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def schedule():
    """A figure as a notebook makes one."""
    figure, ((axes,),) = panels(1, 1, 2.7)
    axes.plot([0, 1, 2, 3], [0.0, 1.0, 0.5, 0.0], label="cosine")
    axes.set(xlabel="step", ylabel="learning rate")
    axes.legend(**LEGEND_BESIDE)
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


def test_what_is_shown_is_what_is_saved(tmp_path):
    shown = show_figure(schedule(), tmp_path / "figure.svg", "A caption.")
    data, metadata = shown._repr_svg_()
    assert data == SVG((tmp_path / "figure.svg").read_text()).data
    assert metadata == {"caption": "A caption."}


@pytest.mark.parametrize(("text", "label"), [(" the", "␣the"), ("\n", "\\n"), ("é", "é"), ("😀", "\\U0001f600")])
def test_token_labels_show_what_cannot_be_seen(text, label):
    assert token_label(text) == label
