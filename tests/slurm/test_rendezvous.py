"""The processes of a job find each other by the variables that papermill_jobs/job.sh exports from Slurm's."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
VARIABLES = ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

ALL_REDUCE = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")  # reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
mine = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(mine)
seen = {name: os.environ[name] for name in ("LOCAL_RANK", "SLURMD_NODENAME")}
seen |= {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": mine.item()}
Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.destroy_process_group()
"""
"""Sums 10^rank over all processes: the digits of the sum say who took part."""

SOURCE = ". papermill_jobs/job.sh && export_rendezvous"
TASKS = "srun bash -c '" + SOURCE + ' && exec python "$0" "$1"\' "$SCRIPT" "$RESULT"'
TORCHRUN = f"""srun bash -c '{SOURCE} && exec torchrun --nnodes $NNODES \\
  --nproc-per-node $NPROC_PER_NODE --node-rank $NODE_RANK --master-addr $MASTER_ADDR \\
  --master-port $MASTER_PORT "$0" "$1"' "$SCRIPT" "$RESULT"
"""


def run_job(cluster, folder: Path, command: str, *options: str, **variables: str) -> str:
    """Runs `command` as a job on the project after a batch script has sourced job.sh; returns its log."""
    lines = ["#!/bin/bash", f"cd {PROJECT}", "set -euo pipefail", SOURCE, command]
    script = folder / "job.sh"
    script.write_text("\n".join(lines) + "\n")
    # the host's own name may not resolve either, so gloo is told which interface to listen on
    variables = {"RESULT": str(folder), "SCRIPT": str(folder / "all_reduce.py"), "OMP_NUM_THREADS": "1", **variables}
    job = cluster.sbatch(script, options=options, cwd=folder, GLOO_SOCKET_IFNAME="lo", **variables)
    cluster.wait(job, "COMPLETED")
    return cluster.log(job)


def all_reduce(cluster, folder: Path, command: str, *options: str, **variables: str) -> list[dict]:
    """What each process of the job saw, by rank."""
    (folder / "all_reduce.py").write_text(ALL_REDUCE)
    log = run_job(cluster, folder, command, *options, **variables)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    assert len(results) == 2, log
    return results


@pytest.mark.parametrize("command", [TASKS, TORCHRUN], ids=["tasks", "torchrun"])
def test_two_nodes_with_a_process_each(cluster, tmp_path, command):
    results = all_reduce(cluster, tmp_path, command, "-N2", "-n2", MASTER_ADDR="127.0.0.1")
    assert [(result["rank"], result["world"], result["sum"]) for result in results] == [(0, 2, 11.0), (1, 2, 11.0)]
    assert [result["LOCAL_RANK"] for result in results] == ["0", "0"]
    assert results[0]["SLURMD_NODENAME"] < results[1]["SLURMD_NODENAME"]


def test_one_node_with_two_tasks(cluster, tmp_path):
    results = all_reduce(cluster, tmp_path, TASKS, "-N1", "-n2")
    assert [(result["rank"], result["world"], result["sum"]) for result in results] == [(0, 2, 11.0), (1, 2, 11.0)]
    assert [result["LOCAL_RANK"] for result in results] == ["0", "1"]
    assert results[0]["SLURMD_NODENAME"] == results[1]["SLURMD_NODENAME"]


def test_torchrun_starts_a_process_for_each_gpu_of_one_node(cluster, tmp_path):
    results = all_reduce(cluster, tmp_path, TORCHRUN, "-N1", "-n1", "--gres=gpu:2")
    assert [(result["rank"], result["world"], result["sum"]) for result in results] == [(0, 2, 11.0), (1, 2, 11.0)]
    assert [result["LOCAL_RANK"] for result in results] == ["0", "1"]


def exported(cluster, folder: Path, *options: str) -> list[dict[str, str]]:
    """The variables that each task of an srun gets, by rank."""
    show = ", ".join(f'\\"{name}\\": \\"${name}\\"' for name in VARIABLES)
    log = run_job(cluster, folder, f"srun bash -c '{SOURCE} && echo \"{{{show}}}\"'", *options)
    return sorted((json.loads(line) for line in log.splitlines()), key=lambda seen: int(seen["RANK"]))


def test_several_nodes_meet_at_the_first(cluster, tmp_path):
    tasks = exported(cluster, tmp_path, "-w", "n2,n3", "-n4", "--ntasks-per-node=2")
    assert {task["MASTER_ADDR"] for task in tasks} == {"n2"}
    assert len({task["MASTER_PORT"] for task in tasks}) == 1
    assert {(task["NNODES"], task["NPROC_PER_NODE"], task["WORLD_SIZE"]) for task in tasks} == {("2", "2", "4")}
    assert [(task["RANK"], task["NODE_RANK"], task["LOCAL_RANK"]) for task in tasks] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]


def test_one_node_meets_at_home_and_another_job_at_another_port(cluster, tmp_path):
    (tmp_path / "other").mkdir()
    (one,), (other,) = exported(cluster, tmp_path, "-w", "n1"), exported(cluster, tmp_path / "other", "-w", "n1")
    assert one["MASTER_ADDR"] == "127.0.0.1"
    assert one["MASTER_PORT"] != other["MASTER_PORT"]
    assert (one["NNODES"], one["NPROC_PER_NODE"], one["WORLD_SIZE"], one["RANK"]) == ("1", "1", "1", "0")
