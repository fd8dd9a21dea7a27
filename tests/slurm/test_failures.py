"""Real training on a real Slurm, which takes its node away in every way that there is: the run ends the same."""

import json
from pathlib import Path

import pytest
import torch
from job_projects import job_project
from notebook_projects import TRAIN, code, parameters
from safetensors.torch import load_file

from lmcore.config import TrainConfig, replace, to_dict
from lmcore.run import RunFolder
from lmcore.train import train

pytestmark = pytest.mark.slurm

WALL_CLOCK = {"seconds", "tokens_per_second", "mfu"}
CHECKPOINT_INTERVAL = 100
STEPS = 1500
"""Seconds of training are left after the first checkpoint, in which the node is taken."""
WAIT_THE_FIRST_TIME = """import os, time
time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else 3600)"""


@pytest.fixture(scope="module")
def config(tiny_run) -> TrainConfig:
    every = {"eval_interval": STEPS, "checkpoint_interval": CHECKPOINT_INTERVAL, "log_interval": 5}
    return replace(tiny_run, steps=STEPS, eval_batch_size=64, **every)


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> RunFolder:
    """The run that nobody stops."""
    run = RunFolder(tmp_path_factory.mktemp("undisturbed") / "run")
    train(config, run)
    return run


def by_hand(cluster, project: Path, *options: str, **variables: object) -> str:
    """Submits the workbook's script from its folder; returns the job's id."""
    folder = project / "papermill_jobs"
    return cluster.sbatch("workbook.sbatch", "--no-writeup", options=options, cwd=folder, NOTEBOOKS="02", **variables)


class Training:
    """A job that trains in a notebook, submitted as a user does by hand."""

    def __init__(self, cluster, folder: Path, config: TrainConfig, *options: str):
        self.cluster = cluster
        cells = ["# 02 Train", parameters(), code(TRAIN)]
        self.project = job_project(folder / "project", _02_train=cells)
        (self.project / "config.json").write_text(json.dumps(to_dict(config)))
        self.run = RunFolder(self.project / "runs" / "smoke" / "runs" / "toy")
        self.job = by_hand(cluster, self.project, *options, OMP_NUM_THREADS=1)

    def wait_for_checkpoint(self) -> None:
        """Waits until training has saved and is beyond."""
        self.cluster.wait_until(lambda: self.step() > CHECKPOINT_INTERVAL, "it has trained and saved", job=self.job)

    def step(self) -> int:
        """The last step in the metrics."""
        lines = self.run.metrics_lines() if self.run.path.is_dir() else []
        return lines[-1]["step"] if lines else 0

    def require_equal(self, undisturbed: RunFolder) -> None:
        """The job ended well after one restart, with the undisturbed run's weights and metrics, bit for bit."""
        assert self.cluster.wait(self.job) == "COMPLETED"
        assert self.cluster.info(self.job)["Restarts"] == "1"
        assert len(self.run.starts()) == 2
        assert "resuming from step" in (self.run.path.parent / "worker0.log").read_text()
        mine, other = (load_file(run.checkpoint_folder / "last.safetensors") for run in (self.run, undisturbed))
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert numbers(self.run) == numbers(undisturbed)


def numbers(run: RunFolder) -> list[dict]:
    """The metrics without what the clock says."""
    return [{key: value for key, value in line.items() if key not in WALL_CLOCK} for line in run.metrics_lines()]


def test_the_node_dies(cluster, tmp_path, config, undisturbed):
    training = Training(cluster, tmp_path, config, "--exclude=n2,n3")
    training.wait_for_checkpoint()
    cluster.kill_node("n1")
    try:
        cluster.wait(training.job, "PENDING")
        assert "State=DOWN" in cluster.run("scontrol", "show", "node", "n1").stdout
        assert training.run.status()["state"] == "running"  # nobody could write another word
        cluster.run("scontrol", "update", f"JobId={training.job}", "ExcNodeList=")
        training.require_equal(undisturbed)
    finally:
        cluster.start_node("n1")


def test_main_takes_the_node_from_spot_with_time_to_save(cluster, tmp_path, config, undisturbed):
    training = Training(cluster, tmp_path, config, "-p", "spot", "-w", "n3", "--exclusive")
    training.wait_for_checkpoint()
    main = cluster.sbatch("--wrap=true", options=["-w", "n3", "--exclusive"], cwd=tmp_path)
    assert cluster.wait(main) == "COMPLETED"
    training.require_equal(undisturbed)
    assert "Notebook 02_train was stopped by SIGUSR1" in cluster.log(training.job)


def test_the_time_limit_comes(cluster, tmp_path):
    """Slurm itself sends the signal, some time before the end of the only minute; without it the job is a TIMEOUT.

    On a busy machine half a minute may not be enough for the notebook either: the job is then queued again.
    """
    project = job_project(tmp_path / "project", _02_train=["# 02", parameters(), code(WAIT_THE_FIRST_TIME)])
    save = "mkdir -p runs/smoke/checkpoints && touch runs/smoke/checkpoints/step_1"
    job = by_hand(cluster, project, "--time=1", "--signal=B:USR1@30", LMCORE_SETUP=save)
    assert cluster.wait(job) == "COMPLETED"
    assert int(cluster.info(job)["Restarts"]) >= 1
    assert "queued again" in cluster.log(job)
