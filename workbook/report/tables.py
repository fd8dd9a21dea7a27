"""Run folders as tables, and tables as results files that say where they come from."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from lmcore.data import PreparedData
from lmcore.errors import FINISHED
from lmcore.provenance import utc_now
from lmcore.run import RunFolder
from workbook.report.results import ENVIRONMENT, Results, in_common

COUNT_CHUNK = 1 << 22
"""Token ids that are counted at a time."""

DIVERGENCE_RISE = 0.5
"""Nats above a uniform guess, or at the end above its own lowest, at which a training loss has diverged."""

CURVE_POINTS = 150
"""Metrics lines kept of each run in the committed curves; all evaluations are kept besides."""

CURVE_COLUMNS = ["step", "tokens", "seconds", "train_loss", "valid_loss", "lr", "grad_norm"]


def unigram_entropy(data: PreparedData) -> float:
    """Entropy of the frequencies of the training tokens, in nats: the loss of a model that knows nothing else."""
    parts = np.array_split(data.train, 1 + len(data.train) // COUNT_CHUNK)
    counts = sum(np.bincount(part, minlength=data.vocab_size) for part in parts)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def table_of_runs(
    results: Results, name: str, make: Callable[[Mapping[str, RunFolder]], pd.DataFrame], runs: Mapping[str, RunFolder]
) -> pd.DataFrame:
    """The table `name` of `results` that `make` gives of the runs; a grader has it made again from what they logged."""
    files = [run.config_file for run in runs.values()]
    return results.table(name, lambda: (make(runs), provenance_of(runs)), made_from=files)


def run_table(runs: Mapping[str, RunFolder]) -> pd.DataFrame:
    """One row for each run: its settings, how it ended, what it reached and what it took.

    `outcome` is complete, diverged, out of memory, failed or interrupted. A run has diverged if a loss was not finite,
    or if it lost what it had learned (`divergence_step`). `diverged_at_step` is the first step whose loss was not
    finite, or that of `divergence_step`.
    """
    return pd.DataFrame([run_row(name, run) for name, run in runs.items()])


def run_row(name: str, run: RunFolder) -> dict[str, Any]:
    """A row of `run_table`."""
    config, status, metrics = run.config(), run.status(), run.metrics()
    steady = metrics["tokens_per_second"].iloc[1:] if len(metrics) > 1 else metrics["tokens_per_second"]
    losses, evaluated = metrics["train_loss"], metrics["valid_loss"].dropna()
    diverged_at = status.get("diverged_at_step", divergence_step(metrics, config.model.vocab_size))
    outcome = "diverged" if status["state"] == "complete" and diverged_at is not None else status["state"]
    return {
        "name": name,
        "optimizer": config.optimizer.name,
        "learning_rate": config.optimizer.learning_rate,
        "weight_decay": config.optimizer.weight_decay,
        "batch_size": config.batch_size,
        "steps": config.steps,
        "tokens": status["step"] * config.tokens_per_step,
        "tie_embeddings": config.model.tie_embeddings,
        "dropout": config.model.dropout,
        "sampling": config.sampling,
        "num_layers": config.model.num_layers,
        "teacher": config.teacher and RunFolder(config.teacher).path.name,
        "outcome": outcome if outcome in (*FINISHED, "failed") else "interrupted",
        "final_valid_loss": float(evaluated.iloc[-1]) if outcome == "complete" and len(evaluated) else None,
        "best_valid_loss": float(evaluated.min()) if len(evaluated) else None,
        "diverged_at_step": diverged_at if outcome == "diverged" else None,
        "max_spike": float((losses - losses.cummin()).max()) if len(losses) else None,
        "seconds": status.get("seconds"),
        "tokens_per_second": float(steady.median()) if len(steady) else None,
        "peak_memory_bytes": _peak_memory(metrics),
        "device": (run.environment() if run.environment_file.exists() else {}).get("device"),
    }


def _peak_memory(metrics: pd.DataFrame) -> int | None:
    """Peak of the training steps up to the first evaluation, whose larger batches are not what is asked for."""
    if "peak_memory_bytes" not in metrics or metrics["peak_memory_bytes"].isna().all():
        return None
    evaluated = metrics.index[metrics["valid_loss"].notna()]
    return int(metrics["peak_memory_bytes"].loc[: evaluated[0] if len(evaluated) else None].max())


def divergence_step(metrics: pd.DataFrame, vocab_size: int) -> int | None:
    """Step at which a run lost what it had learned, else None: one definition for curves of finite losses.

    Either its training loss, once below that of a uniform guess, ln(vocab_size), rose more than `DIVERGENCE_RISE` above
    it: the step of the first such line. Or it ended more than `DIVERGENCE_RISE` above its lowest: the step of the
    lowest; losses are medians over a twentieth of the log here, at least five lines, against noise.
    """
    losses, uniform = metrics["train_loss"], math.log(vocab_size)
    worse = metrics["step"][(losses.cummin() < uniform) & (losses > uniform + DIVERGENCE_RISE)]
    if len(worse):
        return int(worse.iloc[0])
    lines = max(5, len(metrics) // 20)
    smooth = losses.rolling(lines, min_periods=lines // 5).median()
    lost = len(smooth) > 0 and smooth.iloc[-1] > smooth.min() + DIVERGENCE_RISE
    return int(metrics["step"][smooth.idxmin()]) if lost else None


def curves_table(runs: Mapping[str, RunFolder], points: int = CURVE_POINTS) -> pd.DataFrame:
    """Learning curves in long form: a row for each kept metrics line, `name` is that of the run.

    Of long runs every n-th line is kept, at most about `points`, and every line with a validation loss.
    """
    parts = []
    for name, run in runs.items():
        metrics = run.metrics()
        every = math.ceil(max(len(metrics), 1) / points)
        kept = (np.arange(len(metrics)) % every == 0) | metrics["valid_loss"].notna()
        parts.append(metrics.loc[kept, CURVE_COLUMNS].assign(name=name))
    columns = ["name", *CURVE_COLUMNS]
    parts = [part for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def provenance_of(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    """Where the runs come from: machine, versions, commit, command and data; a list where the runs differ."""
    environments = [run.environment() for run in runs.values() if run.environment_file.exists()]
    provenance = {"time_utc": utc_now(), "runs": len(runs)} | in_common(
        environments, (*ENVIRONMENT, "data_fingerprint")
    )
    manifests = {each.get("data_fingerprint"): each.get("data", {}) for each in environments}
    described = [
        {"request": manifest.get("request")}
        | {f"{split}_tokens": values["tokens"] for split, values in manifest.get("splits", {}).items()}
        for manifest in manifests.values()
    ]
    if described:
        provenance["data"] = described[0] if len(described) == 1 else described
    return provenance
