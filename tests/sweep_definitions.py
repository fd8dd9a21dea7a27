"""Small sweeps for tests, and their tasks as processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

from lmcore.workbook.jobs.sweeps import load_definition

TINY = {"model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.d_ff": 24, "model.context_length": 16}
RATES = [0.001, 0.01, 0.1]


def training_sweep(embedded_data: Path) -> dict:
    """Definition of a sweep of three tiny runs."""
    base = {"recipe": "smoke", "data": str(embedded_data), "device": "cpu", "batch_size": 2, "steps": 4} | TINY
    return {"name": "rates", "kind": "train", "base": base, "vary": {"optimizer.learning_rate": RATES}}


BENCHMARK = {
    "name": "times",
    "kind": "benchmark",
    "base": {"size": "smoke", "device": "cpu", "warmup_steps": 0, "steps": 1, "passes": "forward", "batch_size": 1},
    "vary": {"context_length": [8, 16]},
}


def written(folder: Path, values: dict) -> Path:
    """The definition as a file."""
    path = folder / "definition.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def loaded(folder: Path, values: dict, *overrides: str):
    return load_definition(written(folder, values), overrides)


def start(*arguments: object) -> subprocess.Popen:
    """`lmcore sweep run ...` as a process of its own."""
    command = [sys.executable, "-m", "lmcore", "sweep", "run", *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=variables, start_new_session=True, **pipes)


def wait_for(condition, process: subprocess.Popen) -> None:
    """Waits until `condition()`; a process that has ended before is shown."""
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
