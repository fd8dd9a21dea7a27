"""Sweeps as arrays on a real Slurm: a cap, cancelling and going on, measurements with a GPU each, one table."""

import os
import re
from pathlib import Path

import pytest
import yaml

from lmcore.data import CorpusConfig, prepare
from lmcore.workbook.jobs.sweeps import load_definition, run_folder, run_states
from lmcore.workbook.report.tables import read_results

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
TINY = {"model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.d_ff": 24, "model.context_length": 16}
RATES = [0.001, 0.002, 0.004, 0.01]


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> dict:
    """A sweep of four tiny runs on data that are prepared."""
    data = prepare("embedded", "bpe:300", tmp_path_factory.mktemp("data"), CorpusConfig(num_documents=200))
    base = {"recipe": "smoke", "data": str(data.folder), "device": "cpu", "batch_size": 2, "steps": 4} | TINY
    return {"name": "rates", "kind": "train", "base": base, "vary": {"optimizer.learning_rate": RATES}}


def written(folder: Path, values: dict) -> Path:
    """The definition as a file."""
    path = folder / "definition.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def site(folder: Path, gpus: int) -> Path:
    """Settings of a cluster whose jobs have so many GPUs."""
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump({"gpus": gpus, "jobs": {"sweep-table": {"gpus": 0}}}), encoding="utf-8")
    return path


def submit(cluster, definition: Path, out: Path, *options: object, gpus: int = 0) -> tuple[str, str]:
    """Submits the sweep; returns the ids of the array and of the job that makes the table."""
    words = ["submit", "sweep", definition, "--out", out, "--site", site(definition.parent, gpus), *options]
    said = cluster.run("lmcore", *words, cwd=PROJECT, OMP_NUM_THREADS="1").stdout.splitlines()
    array, table = (line.split()[0] for line in said if line[0].isdigit())
    return array, table


def ended(cluster, *jobs: str) -> list[str]:
    """Final states of the jobs, once all have ended."""
    return [cluster.wait(job, timeout=400) for job in jobs]


def rows(out: Path, name: str = "rates") -> list[tuple[str, str]]:
    """Cells and outcomes, as the table has them."""
    table, _, _ = read_results(out / "results" / f"{name}.json")
    return list(table[[table.columns[0], "outcome"]].itertuples(index=False, name=None))


def most_at_once(records: list[dict[str, str]]) -> int:
    """How many tasks ran at the same time, by Slurm's own times."""
    moments = [(record["EndTime"], -1) for record in records] + [(record["StartTime"], 1) for record in records]
    running = [0]
    for _, change in sorted(moments):  # of two in one second, the end comes first
        running.append(running[-1] + change)
    return max(running)


def test_an_array_with_a_cap_ends_in_one_table(cluster, tmp_path, training):
    definition, out = written(tmp_path, training), tmp_path / "out"
    array, table = submit(cluster, definition, out, "--concurrency", 2)
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    tasks = cluster.records(array)
    assert sorted(int(task["ArrayTaskId"]) for task in tasks) == [0, 1, 2, 3]
    assert most_at_once(tasks) == 2
    assert rows(out) == [(f"lr_{rate:g}", "complete") for rate in RATES]
    assert "rates: 4 runs: 4 complete." in cluster.log(table)
    assert (
        f"All of {out} is finished"
        in cluster.run("lmcore", "submit", "sweep", definition, "--out", out, cwd=PROJECT).stdout
    )


def test_after_cancelling_only_what_is_unfinished_is_submitted(cluster, tmp_path, training):
    base = training["base"] | {"steps": 1500, "log_interval": 1, "eval_interval": 1500, "checkpoint_interval": 1500}
    definition = written(tmp_path, training | {"base": base, "vary": {"optimizer.learning_rate": RATES[:3]}})
    out = tmp_path / "out"
    first, second, _ = (run_folder(out, f"lr_{rate:g}") for rate in RATES[:3])
    array, table = submit(cluster, definition, out, "--concurrency", 1)
    cluster.wait_until(
        lambda: second.metrics_file.exists() and len(second.metrics_lines()) > 2, "cell 1 trains", 300, array
    )
    cluster.run("scancel", array)
    assert ended(cluster, array, table) == ["CANCELLED", "COMPLETED"]
    assert [outcome for _, outcome in rows(out)] == ["complete", "stopped", "not run"]
    assert 0 < second.status()["step"] < 1500
    written_at = first.metrics_file.stat().st_mtime_ns
    array, table = submit(cluster, definition, out)
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    assert sorted(int(task["ArrayTaskId"]) for task in cluster.records(array)) == [1, 2]
    assert [outcome for _, outcome in rows(out)] == ["complete"] * 3
    assert first.metrics_file.stat().st_mtime_ns == written_at
    resumed = next(task for task in cluster.records(array) if task["ArrayTaskId"] == "1")
    assert "resuming from step" in Path(resumed["StdOut"]).read_text()


def test_a_task_at_its_time_limit_is_queued_again_and_finishes(cluster, tmp_path, training):
    base = training["base"] | {"steps": 1500, "log_interval": 1, "eval_interval": 1500, "checkpoint_interval": 1500}
    definition = written(tmp_path, training | {"base": base, "vary": {"optimizer.learning_rate": RATES[:2]}})
    out = tmp_path / "out"
    run = run_folder(out, "lr_0.002")
    array, table = submit(cluster, definition, out)
    cluster.wait_until(lambda: run.metrics_file.exists() and len(run.metrics_lines()) > 2, "cell 1 trains", 300, array)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_1")
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    restarts = {task["ArrayTaskId"]: task["Restarts"] for task in cluster.records(array)}
    assert restarts == {"0": "0", "1": "1"}
    assert [outcome for _, outcome in rows(out)] == ["complete", "complete"]
    assert len(run.starts()) == 2


def test_measurements_run_side_by_side_on_a_gpu_each(cluster, tmp_path):
    base = {"size": "smoke", "device": "cpu", "warmup_steps": 0, "mode": "forward", "batch_size": 1}
    sweep = {"name": "times", "kind": "benchmark", "base": base, "vary": {"context_length": [8, 16]}}
    definition, out = written(tmp_path, sweep), tmp_path / "out"
    endless = load_definition(definition, ["steps=1_000_000_000"])
    array, table = submit(cluster, definition, out, "--set", "steps=1_000_000_000", gpus=1)
    cluster.wait_until(
        lambda: [state for state, _ in run_states(endless, out).values()] == ["running"] * 2,
        "both runs are measured at once", 300, array,
    )  # fmt: skip
    said = cluster.run("scontrol", "--details", "show", "job", array).stdout
    places = re.findall(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=gpu\S*?:1\(IDX:(\d+)\)", said)
    assert len(places) == 2, said
    assert len(set(places)) == 2, said
    cluster.run("scancel", array)
    assert ended(cluster, array, table) == ["CANCELLED", "COMPLETED"]
    assert [outcome for _, outcome in rows(out, "times")] == ["stopped", "stopped"]
    array, table = submit(cluster, definition, out, "--set", "steps=2", gpus=1)
    assert ended(cluster, array, table) == ["COMPLETED", "COMPLETED"], cluster.describe(array)
    assert rows(out, "times") == [("smoke-8-fp32-forward-b1", "complete"), ("smoke-16-fp32-forward-b1", "complete")]
    assert not any(name.endswith(".tmp") for name in os.listdir(out / "cases"))
