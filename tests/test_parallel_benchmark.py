"""benchmarks/parallel.py at toy sizes: two ranks, in turns, the same losses by every way to divide the work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.errors import UserError

PROJECT = Path(__file__).parents[1]
CONTESTANTS = (
    "lmcore explicit step, ddp",
    "lmcore explicit step, fsdp, recomputing",
    "lmcore fsdp",
    "NCCL",
    "lmcore ring",
)


def test_toy_sizes(tmp_path):
    out = tmp_path / "parallel.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [
        "benchmarks/parallel.py",
        "--toy",
        "--out",
        str(out),
        "--only",
        "tinystories-256x256 in all",
        "all-reduce",
    ]
    words += ["--contestants", *CONTESTANTS, "--times", "2"]
    done = subprocess.run(
        words, cwd=PROJECT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["contestant"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(CONTESTANTS)
    assert {(row["ranks"], row["outcome"]) for row in rows.values()} == {(2, "complete")}
    assert all(sorted(row["runs"])[1] == row["seconds"] for row in rows.values())
    explicit, *others = (rows[name]["losses"] for name in CONTESTANTS[:3])
    assert others == [explicit, explicit]
    assert explicit[0] > explicit[-1]


def test_none_at_all_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from parallel import main

    with pytest.raises(UserError, match=r"times must be at least 1, not 0\."):
        main(times=0)


def test_the_row_of_several_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from parallel import middle

    runs = [{"outcome": "complete", "seconds": seconds} for seconds in (3.0, 1.0, 2.0)]
    assert middle(runs) == {"outcome": "complete", "seconds": 2.0, "runs": [3.0, 1.0, 2.0]}
    assert middle(runs[:2])["seconds"] == 3.0
    assert middle(runs[:1]) == runs[0]
    failed = {"outcome": "out of memory", "reason": "too large"}
    assert middle([*runs, failed]) == failed
