"""`train.sbatch` on a real Slurm: two nodes with gloo, stopped by a signal, queued again, a rank that dies."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from lmcore.config import replace, to_dict
from lmcore.files import write_json
from lmcore.run import RunFolder

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def settings(tiny_run, tmp_path_factory) -> Path:
    """The settings of a run that saves only when it is stopped."""
    file = tmp_path_factory.mktemp("settings") / "config.json"
    write_json(file, to_dict(replace(tiny_run, eval_interval=10_000, checkpoint_interval=10_000)))
    return file


def submit(cluster, settings: Path, run: Path, size: list, *options: object) -> str:
    """Submits a run; returns the job's id. The names of nodes do not resolve here, nor does the host's own."""
    variables = {"OMP_NUM_THREADS": 1, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "RUN": run}
    asked, words = ["--gres=none", f"--output={run}.log", *size], ["--config", settings, *options]
    return cluster.sbatch("papermill_jobs/train.sbatch", *words, options=asked, cwd=PROJECT, **variables)


def lines(run: Path) -> int:
    folder = RunFolder(run)
    return len(folder.metrics_lines()) if folder.metrics_file.exists() else 0


def test_two_nodes_train_and_go_on_after_a_signal(cluster, settings, tmp_path):
    """With sharded weights; the run is interrupted, queued again, and ends."""
    run, steps = tmp_path / "run", 400
    options = ("--strategy", "fsdp", "--checkpoints", "sharded", "--steps", steps)
    job = submit(cluster, settings, run, ["--nodes=2", "--ntasks-per-node=1"], *options)
    cluster.wait_until(lambda: lines(run) > 5, "the run trains", 300, job)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(job, "COMPLETED", timeout=400)
    log = cluster.log(job)
    assert log.count("resuming from step") == 1, log
    assert [start["ranks"] for start in RunFolder(run).starts()] == [2, 2]
    assert [line["step"] for line in RunFolder(run).metrics_lines()] == [*range(1, steps + 1)]
    assert cluster.info(job)["Restarts"] == "1"


def test_each_task_knows_its_place(cluster, tmp_path):
    """Without an address from the site the tasks meet at the first node."""
    shown = "$RANK/$WORLD_SIZE $NODE_RANK $LOCAL_RANK $MASTER_ADDR"
    command = f"srun bash -c '. papermill_jobs/job.sh && export_rendezvous && echo {shown}'"
    options = ["-w", "n2,n3", "-n4", "--ntasks-per-node=2", f"--output={tmp_path}/log"]
    job = cluster.sbatch(f"--wrap={command}", options=options, cwd=PROJECT)
    cluster.wait(job, "COMPLETED")
    assert sorted(cluster.log(job).splitlines()) == ["0/4 0 0 n2", "1/4 0 1 n2", "2/4 1 0 n2", "3/4 1 1 n2"]


def test_a_rank_that_dies_ends_the_job(cluster, settings, tmp_path):
    run = tmp_path / "run"
    size = ["--nodes=2", "--ntasks-per-node=2"]
    job = submit(cluster, settings, run, size, "--strategy", "zero1", "--steps", 100_000)
    cluster.wait_until(lambda: lines(run) > 5, "the run trains", 300, job)
    ranks = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(run) in (process.info["cmdline"] or []) and "train" in process.info["cmdline"]:
            ranks[int(process.environ()["RANK"])] = process.pid
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[3], signal.SIGKILL)
    cluster.wait(job, "FAILED", timeout=100)
    log = cluster.log(job)
    assert log.count(f"lmcore: Rank 3 (process {ranks[3]} on") == 1, log
    assert RunFolder(run).status()["state"] == "failed"
