"""Sweeps as arrays on a real Slurm: a cap, cancelling and resuming, a time limit, one table."""

from pathlib import Path

import pytest

from lmcore.config import CorpusConfig
from lmcore.data import prepare
from lmcore.results import read_results
from lmcore.run import RunFolder

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
SWEEP = """from lmcore.config import replace
from lmcore.recipes import learning_rate_runs
TINY = dict(d_model=16, num_layers=1, num_heads=2, d_ff=24, context_length=16)
def runs(base):
    base = replace(base, device="cpu", batch_size=2, log_interval=1, eval_interval=base.steps,
                   checkpoint_interval=base.steps, **{f"model__{key}": value for key, value in TINY.items()})
    return learning_rate_runs(base, [0.001, 0.002, 0.004])
"""
NAMES = ["lr_0.001", "lr_0.002", "lr_0.004"]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list:
    """A sweep of three tiny runs."""
    folder = tmp_path_factory.mktemp("sweep")
    prepare("embedded", "bpe:300", folder / "data", CorpusConfig(num_documents=200))
    (folder / "rates.py").write_text(SWEEP)
    (folder / "site.yaml").write_text("gpus: 0\n")
    words = [folder / "rates.py", "--recipe", "smoke", "--data", folder / "data", "--site", folder / "site.yaml"]
    return ["workbook", "submit", "sweep", *words]


def submit(cluster, words: list, out: Path, steps: int, *options: object) -> tuple[str, str]:
    """Submits the sweep; returns the ids of the array and of the job that makes the table."""
    done = cluster.run(*words, "--out", out, "--steps", steps, *options, cwd=PROJECT, OMP_NUM_THREADS="1")
    array, table = (line.split()[0] for line in done.stdout.splitlines() if line[0].isdigit())
    return array, table


def ended(cluster, *jobs: str) -> list[str]:
    """Final states of the jobs, once all have ended."""
    return [cluster.wait(job, timeout=400) for job in jobs]


def outcomes(out: Path) -> list[tuple[str, str]]:
    """Runs and outcomes, as the table has them."""
    table, _, _ = read_results(out / "results" / f"{out.name}.json")
    return [*zip(table["name"], table["outcome"], strict=True)]


def trains(out: Path, name: str) -> bool:
    run = RunFolder(out / name)
    return run.metrics_file.exists() and len(run.metrics_lines()) > 2


def most_at_once(records: list[dict[str, str]]) -> int:
    """How many tasks ran at the same time, by Slurm's own times."""
    moments = [(record["EndTime"], -1) for record in records] + [(record["StartTime"], 1) for record in records]
    running = [0]
    for _, change in sorted(moments):  # of two in one second, the end comes first
        running.append(running[-1] + change)
    return max(running)


def test_an_array_with_a_cap_ends_in_one_table(cluster, tmp_path, words):
    out = tmp_path / "out"
    array, table = submit(cluster, words, out, 4, "--concurrency", 2)
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    tasks = cluster.records(array)
    assert sorted(int(task["ArrayTaskId"]) for task in tasks) == [0, 1, 2]
    assert most_at_once(tasks) == 2
    assert outcomes(out) == [(name, "complete") for name in NAMES]
    again = cluster.run(*words, "--out", out, "--steps", 4, cwd=PROJECT).stdout
    assert again == f"All of {out} is finished.\n"
    assert cluster.run("workbook", "status", out, cwd=PROJECT).stdout.count("completed") == 4


def test_after_cancelling_only_what_is_unfinished_is_submitted(cluster, tmp_path, words):
    out = tmp_path / "out"
    array, table = submit(cluster, words, out, 1500, "--concurrency", 1)
    cluster.wait_until(lambda: trains(out, NAMES[1]), "the second run trains", 300, array)
    cluster.run("scancel", array)
    assert ended(cluster, array, table) == ["CANCELLED", "COMPLETED"]
    assert outcomes(out) == [(NAMES[0], "complete"), (NAMES[1], "interrupted")]
    array, table = submit(cluster, words, out, 1500)
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    assert sorted(int(task["ArrayTaskId"]) for task in cluster.records(array)) == [1, 2]
    assert outcomes(out) == [(name, "complete") for name in NAMES]


def test_a_task_at_its_time_limit_is_queued_again_and_finishes(cluster, tmp_path, words):
    out = tmp_path / "out"
    array, table = submit(cluster, words, out, 1500)
    cluster.wait_until(lambda: trains(out, NAMES[1]), "the second run trains", 300, array)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_1")
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    restarts = {task["ArrayTaskId"]: task["Restarts"] for task in cluster.records(array)}
    assert restarts == {"0": "0", "1": "1", "2": "0"}
    assert outcomes(out) == [(name, "complete") for name in NAMES]
    assert len(RunFolder(out / NAMES[1]).starts()) == 2
