"""The project's own notebooks as jobs: a chain whose training is interrupted ends with a sound writeup."""

import re
from pathlib import Path

import pytest

from lmcore.run import RunFolder
from workbook.record import read_records
from workbook.report.verify import check_writeup

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
MINUTES = 60.0
SHORT = [
    "--parameters", "num_documents=1000", "learning_rates=[0.01,10.0]", "sweep_steps=10", "batch_sizes=[8,64]",
    "batch_tokens=8192", "num_samples=6", "max_new_tokens=96",
]  # fmt: skip
"""Shorter sweeps than by default, and fewer texts."""


def test_training_is_interrupted_and_the_chain_ends_with_the_writeup(cluster, tmp_path):
    out = tmp_path / "out"
    words = ["workbook", "submit", "notebooks", "--notebooks", "02", "03", "--out", out, *SHORT]
    said = cluster.run(*words, cwd=PROJECT, OMP_NUM_THREADS=1).stdout
    jobs = {name: job for job, name in re.findall(r"^(\d+)\s+(\w+)", said, flags=re.MULTILINE)}
    assert list(jobs) == ["02_train", "03_generate", "writeup"]
    run = RunFolder(out / "runs" / "smoke")  # the recipe's own

    def trains() -> bool:
        return run.metrics_file.is_file() and bool(run.metrics_file.read_text())

    cluster.wait_until(trains, "training is under way", 8 * MINUTES, jobs["02_train"])
    cluster.run("scancel", "--batch", "--signal=USR1", jobs["02_train"])
    for job in jobs.values():
        assert cluster.wait(job, timeout=15 * MINUTES) == "COMPLETED", cluster.describe(job)
    times = {name: cluster.info(job) for name, job in jobs.items()}
    assert times["02_train"]["Restarts"] == "1"
    assert "queued again" in cluster.log(jobs["02_train"])
    assert len(run.starts()) == 2  # the run was begun, and gone on with once
    assert times["02_train"]["EndTime"] <= times["03_generate"]["StartTime"]
    assert times["03_generate"]["EndTime"] <= times["writeup"]["StartTime"]
    assert [record.state for record in read_records(out)] == ["done", "done"]
    assert check_writeup(out)["notebooks"] == 2
