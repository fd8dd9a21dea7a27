"""Small projects with the job scripts, made for the tests of jobs."""

import shutil
from pathlib import Path

from notebook_projects import code, make_project, parameters

SCRIPTS = Path(__file__).parents[1] / "papermill_jobs"

TOUCH = "from pathlib import Path\nimport time\nPath(out, '{name}.txt').write_text(str(time.time_ns()))"
"""A cell that leaves a file with the time in the output folder."""


def touching(name: str, *cells: object) -> list:
    """Cells of a notebook that says when it ran, then does `cells`."""
    return [f"# {name}", parameters(), code(TOUCH.format(name=name)), *cells]


def job_project(folder: Path, **notebooks: list) -> Path:
    """A project with the job scripts; by default with notebooks that train, generate and benchmark nothing."""
    names = ("02_train", "03_generate", "04_benchmark")
    made = make_project(folder, **(notebooks or {f"_{name}": touching(name) for name in names}))
    for script in (*SCRIPTS.glob("*.sbatch"), SCRIPTS / "job.sh"):
        shutil.copy(script, made / "papermill_jobs")
    return made
