"""A sweep as an array on a real Slurm, submitted by hand: a task that is stopped and resumes."""

from pathlib import Path

import pytest
from job_projects import SWEEP

from lmcore.run import RunFolder

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
NAMES = ["lr_0.001", "lr_0.002", "lr_0.004"]


def test_an_array_of_which_a_task_is_stopped(cluster, embedded_data, tmp_path):
    """Two tasks share three runs."""
    out = tmp_path / "out"
    (tmp_path / "rates.py").write_text(SWEEP.format(rates=[0.001, 0.002, 0.004]))
    words = [tmp_path / "rates.py", "--recipe", "smoke", "--data", embedded_data, "--steps", 1500]
    options = ["--array=1-2", "--gres=none", f"--output={tmp_path}/%A_%a.log"]
    array = cluster.sbatch("papermill_jobs/sweep.sbatch", *words, options=options, cwd=PROJECT, OUT=out)
    runs = [RunFolder(out / name) for name in NAMES]
    cluster.wait_until(
        lambda: all(run.metrics_file.exists() and len(run.metrics_lines()) > 2 for run in runs[:2]), "two runs train"
    )
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_1")
    assert cluster.wait(array, timeout=400) == "COMPLETED", cluster.describe(array)
    assert {task["ArrayTaskId"]: task["Restarts"] for task in cluster.records(array)} == {"1": "1", "2": "0"}
    assert sum(len(run.starts()) for run in runs) == 4
    assert {run.status()["state"] for run in runs} == {"complete"}
    compared = cluster.run("lmcore", "runs", out).stdout
    assert [name for name in NAMES if f"\n{name} " not in compared] == []
