"""Small projects with notebooks, made for the tests of the workbook and the writeup."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from workbook.notebook import CLEAN_METADATA

PARAMETERS = 'scale = "smoke"\ndata = "embedded"\nout = "../runs/smoke"\nsteps = 3\nrates = [0.1, 1.0]'

SVG = (
    "from IPython.display import SVG, display\n"
    'display(SVG(\'<svg xmlns="http://www.w3.org/2000/svg" width="300" height="90">'
    '<rect width="300" height="90" fill="teal"/></svg>\'))'
)


TRAIN = """import json
from lmcore.config import TrainConfig, from_dict
from workbook.sweep import run_sweep
config = from_dict(TrainConfig, json.load(open("../config.json")))
run_sweep({"toy": config}, f"{out}/runs")["toy"].status()["state"]"""
"""A cell that trains what config.json in the project says."""


def code(source: str, *tags: str, **metadata: object) -> nbformat.NotebookNode:
    """A code cell with tags."""
    return new_code_cell(source, metadata={"tags": list(tags), **metadata})


def parameters(source: str = PARAMETERS) -> nbformat.NotebookNode:
    """The cell that declares the parameters."""
    return code(source, "parameters")


def answered(problem: str, text: str) -> nbformat.NotebookNode:
    """A cell that answers a problem of a handout."""
    return code(f"from workbook.report.answers import answer\nanswer({problem!r}, {text!r})")


def results(path: Path) -> list[str]:
    """The text/plain results in a notebook."""
    outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
    return [output["data"]["text/plain"] for output in outputs if output.output_type == "execute_result"]


def make_project(folder: Path, scale: dict[str, str] | None = None, **notebooks: list) -> Path:
    """A project folder with notebooks/<name>.ipynb (a string is a Markdown cell) and the scale smoke.

    `scale` has the YAML of notebooks by name.
    """
    parameters = folder / "papermill_jobs" / "parameters" / "smoke"
    parameters.mkdir(parents=True)
    (folder / "notebooks").mkdir()
    for name, cells in notebooks.items():
        name = name.lstrip("_")
        made = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
        nbformat.write(new_notebook(cells=made, metadata=CLEAN_METADATA), folder / "notebooks" / f"{name}.ipynb")
        (parameters / f"{name}.yaml").write_text((scale or {}).get(name, "scale: smoke\n"), encoding="utf-8")
    return folder
