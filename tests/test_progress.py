"""Progress of long tasks: a bar where a notebook is open in Jupyter, lines elsewhere."""

import sys
from types import SimpleNamespace

import pytest

from lmcore import progress
from lmcore.progress import Progress, in_jupyter


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


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_where_it_is_watched_and_else_one_line_at_the_end(monkeypatch, capfd, watched):
    monkeypatch.setattr(progress, "in_jupyter", lambda: watched)
    bar = Progress(12, "run", start=2)
    for step in range(3, 13):
        bar.update(step, f"loss {step}")
    bar.update(12, "loss 12")
    bar.close()
    said = capfd.readouterr()
    assert (said.err if watched else said.out).strip().splitlines()[-1].startswith("run: 100%")
    assert "12/12" in said.err + said.out
    assert "loss 12" in said.err + said.out
    assert len(said.out.splitlines()) == (0 if watched else 1)


def test_a_bar_moves_with_every_step_and_tells_the_time_that_is_left(monkeypatch, capfd):
    clock = iter(range(1000))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    monkeypatch.setattr(progress, "in_jupyter", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    bar = Progress(40, "run")
    for step in range(1, 21):
        bar.move(step)
    bar.close()
    drawn = capfd.readouterr().err.split("\r")
    for step in range(1, 21):
        assert any(f" {step}/40 [" in line for line in drawn)
    assert all("<?" not in line for line in drawn if " 10/40 [" in line)


def test_lines_wait_for_an_update(capfd):
    lines = Progress(2, "run")
    lines.move(2)
    assert capfd.readouterr().out == ""
    lines.update(2)
    assert "2/2" in capfd.readouterr().out
