"""The smoke workbook on the cluster: all of it as a chain whose training is interrupted, and training undisturbed.

The notebooks that train, as one job without a disturbance, end with the chain's weights.
"""

import json
import re
from pathlib import Path

import pytest

from lmcore.checkpoint import digest, read_weights
from lmcore.run import RunFolder
from workbook.record import read_record
from workbook.report.verify import check_writeup

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": 1}  # sums of floats differ between numbers of threads
WALL_CLOCK = ("seconds", "tokens_per_second", "mfu", "peak_memory_bytes")
MINUTES = 60.0
TRAINING = [
    "--parameters", "num_documents=1000", "learning_rates=[0.01,10.0]", "sweep_steps=10", "batch_sizes=[8,64]",
    "batch_tokens=8192", "num_samples=6", "max_new_tokens=96",
]  # fmt: skip
"""Shorter sweeps than by default, and fewer texts."""
FEWER = [
    *TRAINING, 'sizes=["smoke"]', "optimizer_size=smoke", "elementwise_size=smoke", "attention_contexts=[128,256]",
    "recipe_steps=10", "steps=2", "warmup_steps=1", "warmups=[0,1,2]", "decode_repeats=1",
    "sample_characters=50000", "corpus_characters=50000", "overfit_steps=60",
]  # fmt: skip
"""Fewer measurements, too: the chain keeps two cores busy all the same."""


@pytest.fixture(scope="module")
def workbooks(cluster, tmp_path_factory) -> tuple[tuple[Path, str], tuple[Path, dict[str, str]]]:
    """Two that ran at the same time, as `one_job` and `chain` give them."""
    one, chain = (tmp_path_factory.mktemp(name) / "out" for name in ("one", "chain"))
    log = f"--output={one.parent}/%x-%j.log"
    trains = cluster.sbatch(
        "papermill_jobs/workbook.sbatch",
        *TRAINING,
        options=[log],
        cwd=PROJECT,
        OUT=one,
        NOTEBOOKS="02 03",
        **ONE_THREAD,
    )
    said = cluster.run("workbook", "submit", "notebooks", "--out", chain, *FEWER, cwd=PROJECT, **ONE_THREAD).stdout
    jobs = {name: job for job, name in re.findall(r"^(\d+)\s+(\w+)", said, flags=re.MULTILINE)}
    train = jobs["02_train"]
    cluster.wait_until(lambda: training_step(chain) >= 100, "training is under way", 8 * MINUTES, train)
    cluster.run("scancel", "--batch", "--signal=USR1", train)
    for job in (*jobs.values(), trains):
        assert cluster.wait(job, timeout=15 * MINUTES) == "COMPLETED", cluster.describe(job)
    return (one, trains), (chain, jobs)


@pytest.fixture(scope="module")
def one_job(cluster, workbooks):
    """OUT of `sbatch papermill_jobs/workbook.sbatch` with the notebooks that train and generate, and the job's log."""
    out, job = workbooks[0]
    return out, cluster.log(job)


@pytest.fixture(scope="module")
def chain(workbooks):
    """OUT of `workbook submit notebooks`, whose training got USR1 in its middle; and the ids of the jobs by name."""
    return workbooks[1]


def training_step(out: Path) -> int:
    """The step of the recipe's own run."""
    status = out / "runs" / "smoke" / "metrics.jsonl"
    return json.loads(status.read_text().splitlines()[-1])["step"] if status.is_file() and status.stat().st_size else 0


def test_one_job_makes_the_writeup(one_job):
    out, log = one_job
    found = check_writeup(out)
    assert found["notebooks"] == 2
    assert f"PDF: {out / 'writeup' / 'answers.pdf'}" in log


def test_the_chain_makes_the_writeup(chain):
    out, _ = chain
    assert check_writeup(out)["notebooks"] == len([*PROJECT.glob("notebooks/[0-9]*.ipynb")])
    assert {entry["state"] for entry in read_record(out)["notebooks"]} == {"done"}


def test_jobs_ran_in_their_order(cluster, chain):
    """03_generate after 02_train, 04 to 07 without waiting for it, the writeup last."""
    times = {name: cluster.info(job) for name, job in chain[1].items()}
    assert times["03_generate"]["StartTime"] >= times["02_train"]["EndTime"]
    assert all(times["writeup"]["StartTime"] >= info["EndTime"] for name, info in times.items() if name != "writeup")
    early = [name for name in times if name[:2] in ("04", "05", "06", "07")]
    assert len(early) == 4
    assert all(times[name]["SubmitTime"] <= times[name]["StartTime"] < times["02_train"]["EndTime"] for name in early)


def test_training_was_interrupted_and_requeued(cluster, chain):
    out, jobs = chain
    assert cluster.info(jobs["02_train"])["Restarts"] == "1"
    log = cluster.log(jobs["02_train"])
    assert "queued again" in log
    starts = RunFolder(out / "runs" / "smoke").starts()
    assert len(starts) == 2  # the run was begun, and gone on with once


def test_the_interrupted_run_equals_the_undisturbed_one(one_job, chain):
    """Every run of the training: the same weights, bit for bit, and the same metrics but for the wall clock."""
    undisturbed, interrupted = (
        {path.parent.relative_to(out): RunFolder(path.parent) for path in out.rglob("metrics.jsonl")}
        for out in (one_job[0], chain[0])
    )
    assert Path("runs/smoke") in undisturbed
    assert len(undisturbed) > 3
    assert undisturbed.keys() <= interrupted.keys()  # other notebooks train, too
    for name, run in undisturbed.items():
        other = interrupted[name]
        assert run.status()["state"] == other.status()["state"], name
        assert numbers(run) == numbers(other), name
        for mine, theirs in ((run.best_weights, other.best_weights), (run.last_weights, other.last_weights)):
            assert mine.is_file() == theirs.is_file(), mine
            assert not mine.is_file() or digest(read_weights(mine)[0]) == digest(read_weights(theirs)[0]), mine


def numbers(run: RunFolder) -> list[dict]:
    """The metrics lines without what the clock says."""
    return [{key: value for key, value in line.items() if key not in WALL_CLOCK} for line in run.metrics_lines()]
