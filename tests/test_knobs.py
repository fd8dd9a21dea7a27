"""Knobs: sliders in JupyterLab, a picture elsewhere; live curves of runs; saved notebooks that git sees unchanged."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from parallel_runs import free_port

from workbook import knobs, notebook, sweep

PROJECT = str(Path(__file__).parents[1])
SOURCE = """from workbook.knobs import knobs
knobs(lambda ax, height: ax.bar(["a"], [height]) and ax.set(ylim=(0, 20)), height=[1, *range(20)])"""


def test_sliders_draw_the_picture_again(monkeypatch):
    drawn, shown = [], []
    monkeypatch.setattr(knobs, "in_jupyter", lambda: True)
    monkeypatch.setattr(knobs, "display", shown.append)

    def draw(ax, **values):
        drawn.append([*values.values(), len(ax.lines)])
        ax.plot([0, values["rate"]])

    knobs.knobs(draw, rate=[1.0, 0.5], top_k=[3, 1, 9], mode=["train", "forward"])
    *sliders, image = shown[0].children
    first, sliders[0].value = image.value, 0.5
    assert drawn == [[1.0, 3, "train", 0], [0.5, 3, "train", 0]]  # each time on empty axes
    assert image.value != first


def test_a_name_that_a_later_cell_takes_is_still_what_it_was(monkeypatch):
    shown, cell = [], {"knobs": knobs.knobs, "width": 2.0}
    monkeypatch.setattr(knobs, "in_jupyter", lambda: True)
    monkeypatch.setattr(knobs, "display", shown.append)
    body = "    ax.plot([width * x for x in (0, rate)], color=color)\nknobs(draw, rate=[1.0, 0.5])"
    exec(f"def draw(ax, rate, color='C1'):\n{body}", cell)
    slider, image = shown[0].children
    cell["width"], first, slider.value = "another", image.value, 0.5
    assert image.value != first


def test_each_run_has_a_line_of_its_own_color(monkeypatch):
    monkeypatch.setattr(knobs, "as_png", lambda canvas: canvas.figure.axes[0])
    runs = {f"lr_{i}": SimpleNamespace(metrics_lines=lambda: [{"step": 1, "train_loss": 9.0}]) for i in range(20)}
    ax = sweep.curves(runs | {"not begun": SimpleNamespace(metrics_lines=list)})
    assert len({str(line.get_color()) for line in ax.lines}) == 20
    assert [text.get_text() for text in ax.texts] == [*runs][-8:]


def test_an_executed_notebook_has_a_picture_and_no_widget_and_saving_it_changes_nothing_for_git(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / ".gitattributes").write_text("*.ipynb filter=notebook\n")
    file, made = tmp_path / "a.ipynb", new_notebook(cells=[new_code_cell(SOURCE)])
    nbformat.write(notebook.clean(made), file)
    for command in ("init -q", "add .", "commit -qm a"):
        subprocess.run([*git, *command.split()], check=True)
    subprocess.run([*git, "config", "filter.notebook.clean", f"{sys.executable} -m workbook.notebook"], check=True)
    NotebookClient(made, resources={"metadata": {"path": PROJECT}}).execute()
    assert ([set(output.data) for output in made.cells[0].outputs]) == [{"image/png", "text/plain"}]
    assert "widgets" not in made.metadata
    for source, status in ((SOURCE, b""), ("changed", b" M a.ipynb\n")):
        made.cells[0].source = source
        nbformat.write(made, file)
        notebook.after_save(os_path=str(file), model={}, contents_manager=None).wait()
        assert subprocess.check_output([*git, "status", "--porcelain"]) == status


RUN_ALL = """async () => {
  await jupyterapp.shell.currentWidget.sessionContext.ready;
  await jupyterapp.shell.currentWidget.sessionContext.session.kernel.info;
  await jupyterapp.commands.execute("notebook:run-all-cells"); }"""
MOVE = """async ([handle, image]) => {
  const begin = performance.now(), old = image.src;
  handle.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
  while (image.src === old) await new Promise(requestAnimationFrame);
  await image.decode();
  return performance.now() - begin; }"""


def test_a_slider_that_moves_in_jupyterlab_changes_the_picture(tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    chromium = shutil.which("chromium") or pytest.skip("needs Chromium")
    made = new_notebook(cells=[new_code_cell(SOURCE)], metadata=notebook.CLEAN_METADATA)
    nbformat.write(made, tmp_path / "a.ipynb")
    port, environment = free_port(), os.environ | {"PYTHONPATH": PROJECT, "JUPYTER_CONFIG_DIR": str(tmp_path / "c")}
    options = f"--no-browser --allow-root --port={port} --IdentityProvider.token= --LabApp.expose_app_in_browser=True"
    command = [sys.executable, "-m", "jupyterlab", *options.split(), f"--notebook-dir={tmp_path}"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as server, api.sync_playwright() as play:
        try:
            page = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
            page.set_default_timeout(100_000)
            while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.2)
            page.goto(f"http://127.0.0.1:{port}/lab/tree/a.ipynb")
            page.wait_for_selector(".jp-Notebook .jp-Cell")
            page.evaluate(RUN_ALL)
            found = [page.wait_for_selector(selector) for selector in (".noUi-handle", ".widget-image")]
            print(f"from key to picture: {sorted(page.evaluate(MOVE, found) for _ in range(5))[2]:.0f} ms")
        finally:
            server.terminate()
