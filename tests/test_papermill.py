"""The notebooks by papermill alone, without `workbook run`: parameters are checked, and a stopped run is resumed."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from notebook_projects import TRAIN, code, make_project, parameters, results

from lmcore.config import replace, to_dict
from lmcore.errors import UserError
from lmcore.run import RunFolder
from workbook.notebook import declared_parameters, read_notebook
from workbook.parameters import find_notebooks, locate, parse_overrides, resolve_parameters

ROOT = Path(__file__).parents[1]
NOTEBOOKS = find_notebooks(ROOT)
DECLARED = {path.stem: declared_parameters(read_notebook(path), path.stem) for path in NOTEBOOKS}
SCALES = ("smoke", "laptop", "gpu")
PAPERMILL = Path(sys.executable).with_name("papermill")


@pytest.mark.parametrize("scale", SCALES)
def test_each_notebook_has_sound_parameters_at_each_scale(scale):
    resolved = resolve_parameters(ROOT, NOTEBOOKS, scale, {}, {"data": "embedded"})  # which some do not need
    for name, given in resolved.items():
        assert (given["scale"], given["out"]) == (scale, f"../runs/{scale}"), name
    files = {file.name for file in (ROOT / "papermill_jobs" / "parameters" / scale).iterdir()}
    assert files == {f"{path.stem}.yaml" for path in NOTEBOOKS}


@pytest.mark.parametrize("scale", SCALES)
def test_notebooks_that_share_a_folder_of_data_ask_for_the_same(scale):
    """Those that run side by side would replace each other's data, under the runs that read them."""
    wanted = {}
    for notebook in NOTEBOOKS:
        source = notebook.read_text(encoding="utf-8")
        if '{out}/data\\"' in source:
            values = resolve_parameters(ROOT, [notebook], scale, {}, {})[notebook.stem]
            known = DECLARED[notebook.stem] | values
            wanted[notebook.stem] = [known[key] for key in ("out", "data", "tokenizer", "num_documents")]
    assert list(wanted) == ["02_train", "03_generate"]
    assert len({tuple(request) for request in wanted.values()}) == 1, wanted


def test_on_a_gpu_settings_are_the_handouts():
    """Not those of the notebooks, which are small enough for the CPU of a laptop or of CI."""
    found = resolve_parameters(ROOT, NOTEBOOKS, "gpu", {}, {})
    for notebook, asked in {
        "03_generate": {"max_new_tokens": 256},
        "04_benchmark": {"batch_size": 4, "vocab_size": 10_000, "warmup_steps": 5, "steps": 10},
        "06_memory": {"vocab_size": 10_000, "contexts": [128, 256, 512, 2048]},
        "08_experiments": {"seeds": [0, 1, 2], "leaderboard_trial": {"recipe": "leaderboard", "steps": 1800}},
        "09_distributed": {"vocab_size": 10_000, "context_length": 512},
    }.items():
        assert {name: found[notebook][name] for name in asked} == asked


def test_a_value_of_another_type_is_refused():
    wrong = {"vocab_size=true": "01_build", "other_data=3": "01_build", "compiled=1": "07_kernels"}
    for pair, notebook in (wrong | {"leaderboard=[1]": "09_distributed"}).items():
        words = f"^Parameter '{pair.partition('=')[0]}' of notebook {notebook} must be of type"
        with pytest.raises(UserError, match=words):
            resolve_parameters(ROOT, find_notebooks(ROOT, [notebook]), "smoke", parse_overrides([pair]), {})


def test_data_without_text_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for name, words in (("empty.txt", "are empty: there is no text"), ("folder", "no text file"), ("x", "no file or")):
        with pytest.raises(UserError, match=words):
            locate(str(tmp_path / name))


def papermill(notebook: Path, folder: Path, *options: str) -> subprocess.Popen:
    """papermill, started in a folder from which the notebook has this relative path."""
    command = [PAPERMILL, os.path.relpath(notebook, folder), "out.ipynb", "--no-progress-bar", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_cell_refuses_in_a_sentence(tmp_path):
    file = str(ROOT / "papermill_jobs" / "parameters" / "smoke" / "02_train.yaml")
    (tmp_path / "text.txt").write_text("Some words.")
    notebook = ROOT / "notebooks" / "02_train.ipynb"
    given = ["-p", "data", str(tmp_path / "text.txt"), "-p", "out", str(tmp_path / "out")]
    process = papermill(notebook, tmp_path, "-f", file, *given)
    said, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert re.search(r"\nUserError: .* A context of 128 tokens needs 129, but .* \(training part\) has only 3\.", said)
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    (error,) = [out for cell in cells for out in cell.get("outputs", []) if out.output_type == "error"]
    assert error.traceback == [f"UserError: {error.evalue}"]  # nothing of the calls that led to it


def test_the_same_command_resumes_after_a_stop(tmp_path, tiny_run):
    """papermill is killed while a cell trains; the training continues by itself, and the next papermill follows it."""
    begin = code("from workbook.parameters import begin_notebook\n\nbegin_notebook()")
    cells = ["# 01", parameters(), begin, code(TRAIN), code("out, steps")]
    project = make_project(tmp_path / "project", {"01_toy": "steps: 5\n"}, _01_toy=cells)
    config = replace(tiny_run, steps=300, eval_batch_size=4096, eval_interval=300)
    (project / "config.json").write_text(json.dumps(to_dict(config)))
    run = RunFolder(project / "runs" / "smoke" / "runs" / "toy")  # by the default ../runs/smoke, from notebooks/
    file = str(project / "papermill_jobs" / "parameters" / "smoke" / "01_toy.yaml")
    notebook = project / "notebooks" / "01_toy.ipynb"
    elsewhere = project / "papermill_jobs"
    first = papermill(notebook, elsewhere, "-f", file)
    deadline = time.monotonic() + 120
    while not run.config_file.exists():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()  # its pipe is the kernel's, too, which ends by itself
    again = papermill(notebook, elsewhere, "-f", file)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert results(elsewhere / "out.ipynb") == ["'complete'", "('../runs/smoke', 5)"]
    assert len(run.starts()) == 1


def test_some_cells_of_a_notebook(tmp_path, monkeypatch, capsys):
    words = ["cells.py", "09_distributed", str(tmp_path), "=print(scale, steps)", "parallel-costs"]
    words += ["=print(costs(2, 3, 5)['forward']['flops'])", "=1 / 0", "--scale", "smoke"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.chdir(ROOT)
    assert runpy.run_path("papermill_jobs/cells.py")["main"]() == "This cell failed: 1 / 0"
    assert "smoke 5\n180.0\n" in capsys.readouterr().out
