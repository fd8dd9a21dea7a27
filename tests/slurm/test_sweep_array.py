"""A sweep as an array on a real Slurm: a task that is stopped and resumes, one table."""

from pathlib import Path

import pytest
from job_projects import SWEEP

from lmcore.run import RunFolder
from workbook.report.results import read_results

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
NAMES = ["lr_0.001", "lr_0.002", "lr_0.004"]


def test_an_array_of_which_a_task_is_stopped_ends_in_one_table(cluster, embedded_data, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "rates.py").write_text(SWEEP.format(rates=[0.001, 0.002, 0.004]))
    (tmp_path / "site.yaml").write_text("gres: none\n")
    words = ["workbook", "submit", "sweep", tmp_path / "rates.py", "--recipe", "smoke", "--data", embedded_data]
    words += ["--site", tmp_path / "site.yaml", "--out", out, "--steps", 1500, "--concurrency", 2]
    said = cluster.run(*words, cwd=PROJECT).stdout
    array, table = (line.split()[0] for line in said.splitlines() if line[0].isdigit())
    stopped = RunFolder(out / NAMES[1])
    cluster.wait_until(
        lambda: stopped.metrics_file.exists() and len(stopped.metrics_lines()) > 2, "the second run trains", job=array
    )
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_1")
    assert [cluster.wait(job, timeout=400) for job in (array, table)] == ["COMPLETED"] * 2, cluster.describe(array)
    assert {task["ArrayTaskId"]: task["Restarts"] for task in cluster.records(array)} == {"0": "0", "1": "1", "2": "0"}
    assert len(stopped.starts()) == 2
    rows, _, _ = read_results(out / "results" / "out.json")
    assert [*zip(rows["name"], rows["outcome"], strict=True)] == [(name, "complete") for name in NAMES]
    assert cluster.run(*words, cwd=PROJECT).stdout == f"All of {out} is finished.\n"
    assert cluster.run("workbook", "status", out, cwd=PROJECT).stdout.count("COMPLETED") == 4
