"""Figures hold the data that they were given and are saved as the same bytes every time."""

import math

import numpy as np
import pandas as pd
import pytest
from IPython.display import SVG
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from lmcore.errors import UserError
from lmcore.workbook.report.figures import (
    WARNING,
    learning_curves,
    learning_rate_sweep,
    save_figure,
    schedule_figure,
    sgd_toy_figure,
    show_figure,
    use_style,
)
from lmcore.workbook.report.notebook import token_label


@pytest.fixture(scope="module", autouse=True)
def style():
    use_style()


def metrics(final: float = 2.0, steps: int = 100, every: int = 10) -> pd.DataFrame:
    step = np.arange(every, steps + 1, every)
    loss = final + 5 * np.exp(-step / 20)
    valid = np.where(step % 50 == 0, loss + 0.1, np.nan)
    return pd.DataFrame(
        {"step": step, "tokens": step * 64, "seconds": step * 1.5, "train_loss": loss, "valid_loss": valid}
    )


def sweep() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "name": ["a", "b", "c", "d"],
            "learning_rate": [1e-3, 3e-3, 1e-2, 3e-2],
            "batch_size": [32, 32, 32, 32],
            "final_valid_loss": [2.0, 1.8, 1.9, math.nan],
            "best_valid_loss": [2.0, 1.8, 1.85, 3.0],
            "outcome": ["complete", "complete", "complete", "diverged"],
            "diverged_at_step": [math.nan, math.nan, math.nan, 70],
            "max_spike": [0.1, 0.2, 0.9, 6.0],
        }
    )


FIGURES = {
    "learning_curves": lambda: learning_curves({"one": metrics(), "two": metrics(1.5)}, "seconds", floor=1.2),
    "learning_rate_sweep": lambda: learning_rate_sweep(sweep()),
    "schedule_figure": lambda: schedule_figure({"cosine": [0.0, 1.0, 0.5, 0.0]}, {"end of warm-up": 1}),
    "sgd_toy_figure": lambda: sgd_toy_figure({10.0: [3, 2, 1], 1000.0: [3, 300, math.inf]}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_saved_twice_it_is_the_same_file(name, tmp_path):
    first = save_figure(FIGURES[name](), tmp_path / "first.svg").read_bytes()
    second = save_figure(FIGURES[name](), tmp_path / "second.svg").read_bytes()
    assert first == second
    assert first.startswith(b"<?xml")
    assert b"<dc:date>" not in first
    assert b"<text" not in first  # text is drawn as paths: no font is needed to show it


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_at_the_edge(name):
    figure = FIGURES[name]()
    FigureCanvasAgg(figure).draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_a_figure_that_cannot_be_saved_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Cannot write"):
        save_figure(FIGURES["schedule_figure"](), tmp_path / "file" / "figure.svg")


def test_what_is_shown_is_what_is_saved(tmp_path):
    shown = show_figure(FIGURES["schedule_figure"](), tmp_path / "figure.svg", "A caption.")
    data, metadata = shown._repr_svg_()
    assert data == SVG((tmp_path / "figure.svg").read_text()).data
    assert metadata == {"caption": "A caption."}


def test_learning_curves_draw_every_loss_and_the_floor():
    table = metrics()
    axes = learning_curves({"run": table}, "tokens", floor=1.25).axes[0]
    train, valid, floor = axes.lines
    assert train.get_xdata().tolist() == table["tokens"].tolist()
    assert train.get_ydata() == pytest.approx(table["train_loss"])
    assert valid.get_xdata().tolist() == [50 * 64, 100 * 64]
    assert valid.get_ydata() == pytest.approx(table["valid_loss"].dropna())
    assert valid.get_linewidth() > train.get_linewidth()
    assert set(floor.get_ydata()) == {1.25}
    assert axes.get_ylim()[0] < 1.25


def test_learning_curves_average_long_runs_and_leave_out_what_is_not_finite():
    table = metrics(steps=50_000)
    table.loc[table.index[-1], "train_loss"] = math.inf
    train, _ = learning_curves({"run": table}).axes[0].lines
    values = train.get_ydata()
    assert 100 < len(values) <= 200
    assert np.isfinite(values).all()
    assert values.min() >= table["train_loss"].min()


def test_learning_curves_without_any_validation():
    table = metrics().assign(valid_loss=np.nan)
    low, high = learning_curves({"run": table}).axes[0].get_ylim()
    assert low < table["train_loss"].min() < high


def test_learning_curves_show_where_runs_end_unless_they_diverged():
    runs = {"good": [6.0, 1.0], "slow": [6.2, 4.5], "diverged": [6.1, 50.0]}
    tables = {
        name: pd.DataFrame({"step": [1, 2], "train_loss": losses, "valid_loss": losses, "tokens": 0, "seconds": 0})
        for name, losses in runs.items()
    }
    assert 4.5 < learning_curves(tables).axes[0].get_ylim()[1] < 6


def test_wall_clock_time_has_a_fitting_unit():
    labels = [
        learning_curves({"run": metrics().assign(seconds=lambda t, scale=scale: t["step"] * scale)}, "seconds")
        for scale in (0.1, 3.0, 400.0)
    ]
    assert [figure.axes[0].get_xlabel() for figure in labels] == [
        f"wall-clock time ({unit})" for unit in ("seconds", "minutes", "hours")
    ]


def test_ten_runs_have_ten_colors_and_a_legend_beside_the_axes():
    figure = learning_curves({f"run {i}": metrics(1 + i / 10) for i in range(10)})
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    bold = [line for line in axes.lines if line.get_marker() == "o"]
    assert len({to_rgb(line.get_color()) for line in bold}) == 10
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1


def test_a_sweep_marks_the_runs_that_diverged():
    losses, spikes = learning_rate_sweep(sweep()).axes
    done, crosses = losses.lines[0], next(line for line in losses.lines if line.get_marker() == "X")
    assert done.get_xdata().tolist() == [1e-3, 3e-3, 1e-2]
    assert done.get_ydata().tolist() == [2.0, 1.8, 1.9]
    assert crosses.get_xdata().tolist() == [3e-2]
    assert to_rgb(crosses.get_color()) == to_rgb(WARNING)
    assert losses.get_xscale() == "log"
    assert spikes.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.9]
    assert {text.get_text() for text in losses.texts} == {"70", "1.800"}
    assert [tick.get_text() for tick in spikes.get_xticklabels()] == ["1e-3", "3e-3", "1e-2", "3e-2"]


def test_a_sweep_in_which_all_runs_diverged():
    table = sweep().assign(outcome="diverged", diverged_at_step=5.0)
    figure = learning_rate_sweep(table)
    FigureCanvasAgg(figure).draw()
    crosses = next(line for line in figure.axes[0].lines if line.get_marker() == "X")
    assert len(crosses.get_xdata()) == 4


def test_the_toy_marks_the_last_loss_before_overflow():
    axes = sgd_toy_figure({10.0: [3.0, 2.0], 1000.0: [3.0, 300.0, math.inf, math.nan]}).axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "X"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in crosses] == [(1, 300.0)]
    assert axes.get_yscale() == "log"


@pytest.mark.parametrize(("text", "label"), [(" the", "␣the"), ("\n", "\\n"), ("é", "é"), ("😀", "\\U0001f600")])
def test_token_labels_show_what_cannot_be_seen(text, label):
    assert token_label(text) == label
