"""Progress of long tasks: a bar where a notebook is open in Jupyter, lines elsewhere."""

import sys
from types import SimpleNamespace

import pytest

from lmcore import progress
from lmcore.progress import Progress, in_jupyter


class Picture:
    """Stands for the handle of a display."""

    def __init__(self):
        self.shown = []

    def update(self, data, raw):
        self.shown.append(data["text/html"])


@pytest.mark.parametrize(
    ("session", "shell", "found"),
    [
        ("02_train.ipynb", SimpleNamespace(kernel=1), True),
        (None, SimpleNamespace(kernel=1), False),  # papermill
        ("02_train.ipynb", SimpleNamespace(), False),  # IPython in a terminal
        ("02_train.ipynb", None, False),  # a process that a kernel has started
    ],
)
def test_a_notebook_that_is_open_in_jupyter_is_told_apart(monkeypatch, session, shell, found):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session:
        monkeypatch.setenv("JPY_SESSION_NAME", session)
    assert in_jupyter() == found


def test_a_bar_in_jupyter_names_the_run_its_step_and_its_loss(monkeypatch, capsys):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "in_jupyter", lambda: True)
    monkeypatch.setattr(progress, "show_live", lambda html: Picture())
    bar = Progress(10, "a<b")
    for step in range(1, 11):
        clock.now += 0.2
        bar.update(step, f"loss {step}")
    bar.close()
    assert len(bar.picture.shown) == 4  # not at every step, but at the last one
    assert '<progress value="10" max="10"' in bar.picture.shown[-1]
    assert "a&lt;b: step 10/10, 2 s, 5 steps/s, loss 10" in bar.picture.shown[-1]
    assert capsys.readouterr().out == ""


def test_headless_it_prints_lines(monkeypatch, capsys):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    bar = Progress(2, "run")
    bar.update(1, "loss 3.000")
    bar.update(2, "loss 2.000")
    bar.update(2, "loss 2.000")
    (line,) = capsys.readouterr().out.splitlines()  # the end is told once
    assert line.endswith("loss 2.000")
