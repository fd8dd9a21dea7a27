"""Sentences of notebook 07 on the whole step: the ladder of gains, and the learning curve with the fast path."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lmcore.config import TrainConfig, replace
from lmcore.errors import require
from lmcore.recipes import fast
from lmcore.run import RunFolder
from lmcore.workbook.report.answers import format_bytes, format_percent, format_seconds, format_significant
from lmcore.workbook.report.benchmark.views import MISSING, format_rate, given
from lmcore.workbook.report.kernels.figures import curves_figure, ladder_figure, relative_difference
from lmcore.workbook.report.tables import provenance_of, read_results, write_results

LOSS_TOLERANCES = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference of the losses of two runs that differ in rounding alone, averaged over a window of
steps. bfloat16 rounds to one part in 256, and what is rounded otherwise in one step grows in the next ones."""

WINDOWS = 10
"""Parts of a run over which losses are averaged before they are compared."""

CURVES = "kernels_curves"
"""Name of the results file and the figure of the two learning curves."""


def ladder_answer(table: pd.DataFrame) -> str:
    """The rungs as a table: time, tokens per second, memory, and the gain of each; what cannot run here is a row."""
    done = table.dropna(subset="wall_median")
    if not len(done):
        return "No step was measured."
    first, rows, before = done.iloc[0], [], None
    for row in table.to_dict("records"):
        timed = given(row["wall_median"])
        rows.append(
            {
                "step": row["rung"],
                "what": row["what"],
                "median time": format_seconds(row["wall_median"]) if timed else f"**{row['outcome']}**",
                "tokens/s": format_rate(row["tokens_per_second"]) if timed else MISSING,
                "times as fast as the first": _ratio(first["wall_median"], row) if timed else MISSING,
                "as the one before": _ratio(before, row) if timed and before else MISSING,
                "peak memory": format_bytes(row["peak_memory_bytes"]) if given(row["peak_memory_bytes"]) else MISSING,
                "MFU": format_percent(row["mfu"]) if given(row["mfu"]) else MISSING,
            }
        )
        before = row["wall_median"] if timed else before
    shown = pd.DataFrame(rows)
    empty = [name for name in ("peak memory", "MFU") if (shown[name] == MISSING).all()]
    reasons = [f"`{row['rung']}`: {row['reason']}" for row in table.to_dict("records") if not given(row["wall_median"])]
    last = done.iloc[-1]
    text = (
        f"A training step of size `{first['size']}` at batch {first['batch_size']:,.0f}, context "
        f"{first['context_length']:,.0f}, {first['precision']}, on {first['device']}, without clipping:\n\n"
        f"{shown.drop(columns=empty).to_markdown(index=False, disable_numparse=True)}\n\n"
        f"From `{first['rung']}` to `{last['rung']}` a step becomes "
        f"**{format_significant(first['wall_median'] / last['wall_median'])} times as fast**. {_largest_gain(done)}"
    )
    if last["device"] == "CPU":
        text += (
            " On a CPU `flash` and `fused` are the kernels' twins in plain PyTorch: the rungs show that every change "
            "computes the same step, and the gain is the GPU's matter (section 8)."
        )
    return " ".join([text, *(f"Not measured, {reason}" for reason in reasons)]).strip()


def _ratio(before: float, row: Mapping) -> str:
    return f"{before / row['wall_median']:.2f}"


def _largest_gain(done: pd.DataFrame) -> str:
    if len(done) < 2:
        return ""
    gains = done["wall_median"].astype(float).shift() / done["wall_median"].astype(float)
    best, worst = gains.idxmax(), gains.idxmin()
    text = (
        f"The largest gain is that of `{done.loc[best, 'rung']}` ({gains[best]:.2f} times as fast as the rung before)"
    )
    if gains[worst] < 1:
        text += f"; `{done.loc[worst, 'rung']}` is slower than the rung before ({gains[worst]:.2f})"
    return text + "."


def rungs_figure(table: pd.DataFrame):
    """The ladder as bars; a rung that was not measured says so."""
    return ladder_figure(table["rung"].tolist(), table["wall_median"].tolist(), table["outcome"].tolist())


def curve_runs(config: TrainConfig) -> dict[str, TrainConfig]:
    """The same run twice: with plain operations one by one, and with the fast path."""
    plain = replace(config, ops="plain", compile=False, model__attention="plain")
    return {"plain": plain, "fast": fast(plain)}


@dataclass(frozen=True)
class Curves:
    """Two runs of one configuration, and how far their losses are apart."""

    plain: pd.DataFrame
    fast: pd.DataFrame
    valid_losses: tuple[float, float]
    """Final validation losses, plain and fast."""
    rates: tuple[float, float]
    """Tokens per second."""
    precision: str
    steps: int
    commit: str | None = None
    """Of lmcore, if it is the same in both runs."""

    def tables(self) -> dict[str, pd.DataFrame]:
        """The metrics of both, by label; the definition first."""
        return {"plain operations": self.plain, "fast path": self.fast}

    @property
    def tolerance(self) -> float:
        """Largest difference that is taken for rounding."""
        return LOSS_TOLERANCES[self.precision]

    @property
    def largest_difference(self) -> float:
        """Of the training losses, relative, each averaged over a tenth of the run."""
        _, difference = relative_difference(windowed(self.fast), windowed(self.plain))
        return float(np.abs(difference).max())

    @property
    def validation_difference(self) -> float:
        """Of the final validation losses, relative."""
        plain, fast = self.valid_losses
        return abs(fast / plain - 1)

    @property
    def agree(self) -> bool:
        """Whether both differences are within the tolerance."""
        return max(self.largest_difference, self.validation_difference) <= self.tolerance


def windowed(metrics: pd.DataFrame, windows: int = WINDOWS) -> pd.DataFrame:
    """Mean training loss of each part of a run; `step` is the part's last."""
    parts = np.arange(len(metrics)) * min(windows, len(metrics)) // max(len(metrics), 1)
    return metrics.groupby(parts).agg(step=("step", "last"), train_loss=("train_loss", "mean"))


def write_curves(runs: Mapping[str, RunFolder], results: str | os.PathLike) -> Curves:
    """Writes the metrics of the runs of `curve_runs` into the folder `results`; gives back what it holds now.

    Raises `UserError`, and writes nothing, if one of them has not come to its end.
    """
    for name, run in runs.items():
        status = run.status()
        found = f"The {name} run in {run.path} is {status['state']} at step {status['step']}: there is no whole curve."
        require(status["state"] == "complete", found)
    columns = ["name", "step", "tokens", "seconds", "train_loss", "valid_loss", "grad_norm", "tokens_per_second"]
    table = pd.concat([run.metrics().assign(name=name) for name, run in runs.items()], ignore_index=True)[columns]
    config = runs["plain"].config()
    notes = {"precision": config.precision, "steps": config.steps}
    write_results(table, Path(results) / f"{CURVES}.json", provenance_of(runs), **notes)
    return read_curves(results)


def read_curves(results: str | os.PathLike) -> Curves:
    """What `write_curves` left in the folder."""
    table, provenance, notes = read_results(Path(results) / f"{CURVES}.json")
    tables = [table[table["name"] == name].reset_index(drop=True) for name in ("plain", "fast")]
    commit = provenance.get("git_commit")
    return Curves(
        *tables,
        valid_losses=tuple(float(metrics["valid_loss"].dropna().iloc[-1]) for metrics in tables),
        rates=tuple(float(metrics["tokens_per_second"].iloc[1:].median()) for metrics in tables),
        **notes,
        commit=commit if isinstance(commit, str) else None,  # a list where the runs differ
    )


def _at_most(difference: float, words: str = "at most ") -> str:
    """A relative difference, without digits where it is far below any that matters."""
    return "less than 0.001%" if difference < 1e-5 else f"{words}{format_percent(difference, 2)}"


def curves_answer(curves: Curves) -> str:
    """Whether the fast path has the same learning curve, and how much faster the run is."""
    return (
        f"Over {curves.steps:,} steps in {curves.precision} the two have {_comparison(curves)} Both runs start from "
        "the same weights and see the same batches, so that what is left is rounding, which grows from step to step as "
        f"in any two runs that do not add in the same order. {_gain(curves)}"
    )


def curves_sentences(curves: Curves) -> str:
    """The same in short, for the README."""
    commit = f" (commit {curves.commit[:9]})" if curves.commit else ""
    return (
        f"Trained for {curves.steps:,} steps in {curves.precision} from the same weights on the same stories{commit}, "
        f"once operation by operation and once by the fast path, a model has {_comparison(curves)} {_gain(curves)}"
    )


def _comparison(curves: Curves) -> str:
    plain, fast = (f"{loss:.4f}" for loss in curves.valid_losses)
    return (
        f"{'**the same learning curve**' if curves.agree else '**another learning curve**'}: averaged over a tenth of "
        f"the run, the training losses differ by {_at_most(curves.largest_difference)}, and the final validation "
        f"losses, {plain} and {fast}, by {_at_most(curves.validation_difference, '')}; "
        f"{format_percent(curves.tolerance, 2)} is allowed."
    )


def _gain(curves: Curves) -> str:
    before, after = curves.rates
    return f"The fast run goes through {format_significant(after / before)} times as many tokens per second."


def curves_in(results: str | os.PathLike) -> Curves | None:
    """The learning curves that were measured into the folder, if they were."""
    return read_curves(results) if (Path(results) / f"{CURVES}.json").is_file() else None


def both_curves_figure(curves: Curves) -> Figure:
    """Both losses, and how far they are apart."""
    return curves_figure(curves.tables(), curves.tolerance)
