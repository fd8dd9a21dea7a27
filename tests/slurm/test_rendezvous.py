"""The processes of a job find each other by the variables that papermill_jobs/job.sh exports from Slurm's."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
ALL_REDUCE = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")  # reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
mine = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(mine)
seen = [dist.get_rank(), dist.get_world_size(), mine.item(), os.environ["LOCAL_RANK"], os.environ["SLURMD_NODENAME"]]
Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.destroy_process_group()
"""
"""Sums 10^rank over all processes: the digits of the sum say who took part."""

SOURCE = ". papermill_jobs/job.sh && export_rendezvous"
TORCHRUN = f"""srun bash -c '{SOURCE} && exec torchrun --nnodes $NNODES \\
  --nproc-per-node $NPROC_PER_NODE --node-rank $NODE_RANK --master-addr $MASTER_ADDR \\
  --master-port $MASTER_PORT "$0" "$1"' "$SCRIPT" "$RESULT"
"""


def run_job(cluster, folder: Path, command: str, *options: str, **variables: str) -> str:
    """Runs `command` as a job on the project after a batch script has sourced job.sh; returns its log."""
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", f"cd {PROJECT}", "set -euo pipefail", SOURCE, command, ""]))
    # the host's own name may not resolve either, so gloo is told which interface to listen on
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    job = cluster.sbatch(script, options=options, cwd=folder, **variables)
    cluster.wait(job, "COMPLETED")
    return cluster.log(job)


def test_torchrun_starts_a_process_for_each_gpu_of_two_nodes(cluster, tmp_path):
    (tmp_path / "all_reduce.py").write_text(ALL_REDUCE)
    variables = {"RESULT": str(tmp_path), "SCRIPT": str(tmp_path / "all_reduce.py"), "MASTER_ADDR": "127.0.0.1"}
    log = run_job(cluster, tmp_path, TORCHRUN, "-w", "n2,n3", "-n2", "--gres=gpu:2", **variables)
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    places = [("0", "n2"), ("1", "n2"), ("0", "n3"), ("1", "n3")]
    assert results == [[rank, 4, 1111.0, *place] for rank, place in enumerate(places)], log


@pytest.mark.parametrize(
    ("options", "address", "tasks"),
    [
        (("-w", "n2,n3", "-n4", "--ntasks-per-node=2"), "n2", ["0/4 0 0", "1/4 0 1", "2/4 1 0", "3/4 1 1"]),
        (("-w", "n1", "-n1"), "127.0.0.1", ["0/1 0 0"]),
    ],
    ids=["several nodes meet at the first", "one node meets at home"],
)
def test_each_task_knows_its_place(cluster, tmp_path, options, address, tasks):
    show = "$RANK/$WORLD_SIZE $NODE_RANK $LOCAL_RANK at $MASTER_ADDR"
    log = run_job(cluster, tmp_path, f"srun bash -c '{SOURCE} && echo {show}'", *options)
    assert sorted(log.splitlines()) == [f"{task} at {address}" for task in tasks]
