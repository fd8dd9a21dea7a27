"""Small projects with the job scripts, and stand-ins for Slurm's commands, made for the tests of jobs."""

import shutil
from pathlib import Path

import pytest
from notebook_projects import code, make_project, parameters

SCRIPTS = Path(__file__).parents[1] / "papermill_jobs"

TOUCH = "from pathlib import Path\nimport time\nPath(out, '{name}.txt').write_text(str(time.time_ns()))"
"""A cell that leaves a file with the time in the output folder."""

SWEEP = """from lmcore.config import replace
TINY = dict(d_model=16, num_layers=1, num_heads=2, d_ff=24, context_length=16)
def runs(base):
    base = replace(base, device="cpu", batch_size=2, log_interval=1, eval_interval=base.steps,
                   checkpoint_interval=base.steps, optimizer__name="sgd", optimizer__max_grad_norm=None,
                   **{{f"model__{{key}}": value for key, value in TINY.items()}})
    return {{f"lr_{{rate:g}}": replace(base, optimizer__learning_rate=rate) for rate in {rates}}}
"""
"""A sweep of tiny runs."""


def touching(name: str, *cells: object) -> list:
    """Cells of a notebook that says when it ran, then does `cells`."""
    return [f"# {name}", parameters(), code(TOUCH.format(name=name)), *cells]


def job_project(folder: Path, **notebooks: list) -> Path:
    """A project with the job scripts; by default with notebooks that train, generate and benchmark nothing."""
    names = ("02_train", "03_generate", "04_benchmark")
    made = make_project(folder, **(notebooks or {f"_{name}": touching(name) for name in names}))
    for script in (*SCRIPTS.glob("*.sbatch"), *SCRIPTS.glob("*.sh")):
        shutil.copy(script, made / "papermill_jobs")
    return made


def command(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch | None = None) -> Path:
    """A stand-in for a program; it writes its arguments into folder/<name>.called, which is returned."""
    (folder / name).write_text(f'#!/bin/bash\necho "$@" >>"{folder}/{name}.called"\n{script}\n')
    (folder / name).chmod(0o755)
    if monkeypatch is not None:
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / f"{name}.called"
