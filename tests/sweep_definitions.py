"""Small sweeps for tests."""

from pathlib import Path

import yaml

from lmcore.workbook.jobs.sweep_definition import load_definition

TINY = {"model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.d_ff": 24, "model.context_length": 16}
RATES = [0.001, 0.01, 0.1]


def training_sweep(embedded_data: Path) -> dict:
    """Definition of a sweep of three tiny runs."""
    base = {"recipe": "smoke", "data": str(embedded_data), "device": "cpu", "batch_size": 2, "steps": 4} | TINY
    return {"name": "rates", "kind": "train", "base": base, "vary": {"optimizer.learning_rate": RATES}}


BENCHMARK = {
    "name": "times",
    "kind": "benchmark",
    "base": {"size": "smoke", "device": "cpu", "warmup_steps": 0, "steps": 1, "mode": "forward", "batch_size": 1},
    "vary": {"context_length": [8, 16]},
}


def written(folder: Path, values: dict | str) -> Path:
    """The definition, or another text, as a file."""
    path = folder / "definition.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def loaded(folder: Path, values: dict, *overrides: str):
    return load_definition(written(folder, values), overrides)
