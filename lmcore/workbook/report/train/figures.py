"""Figures of notebook 02 that the general ones do not cover."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lmcore.workbook.report.figures import LEGEND_BESIDE, WARNING, panels, sequence_colors, thinned


def divergence_figure(runs: Mapping[str, pd.DataFrame], unigram_entropy: float) -> Figure:
    """Training loss of each run on a logarithmic axis that shows all of it, and the loss of token frequencies alone.

    `runs` maps labels, in increasing order of the learning rate, to their curves. Losses are averaged over neighboring
    lines to at most 60 points.
    """
    figure, ((axes,),) = panels(1, 1, 3.2)
    for color, (label, curve) in zip(sequence_colors(len(runs)), runs.items(), strict=True):
        means = thinned(curve[["step", "train_loss"]], points=60)
        axes.plot(means["step"], means["train_loss"], color=color, label=label)
    axes.axhline(unigram_entropy, color="black", linestyle=":", linewidth=1, label="token frequencies")
    axes.set(xlabel="step", ylabel="training loss (nats per token)", yscale="log")
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(title="learning rate", **LEGEND_BESIDE)
    return figure


def batch_size_figure(table: pd.DataFrame) -> Figure:
    """Final validation loss and throughput by batch size; a red cross stands at one that diverged or did not fit."""
    figure, ((losses,), (speeds,)) = panels(2, 1, 4.0, sharex=True)
    done = table[table["outcome"] == "complete"].sort_values("batch_size")
    losses.plot(done["batch_size"], done["final_valid_loss"], marker="o", markersize=4.5)
    speeds.plot(done["batch_size"], done["tokens_per_second"], marker="o", markersize=4.5, color="#029e73")
    failed = table[table["outcome"].isin(["diverged", "out of memory"])]
    for size, outcome in zip(failed["batch_size"], failed["outcome"], strict=True):
        edge = losses.get_xaxis_transform()
        losses.plot(size, 1, "X", color=WARNING, markersize=9, transform=edge, clip_on=False)
        for axes in (losses, speeds):
            axes.axvline(size, color=WARNING, linewidth=0.8, alpha=0.35)
        losses.annotate(
            outcome, (size, 1), (-2, -8), xycoords=edge, textcoords="offset points", ha="right", va="top",
            rotation=90, color=WARNING, fontsize=8,
        )  # fmt: skip
    losses.set(ylabel="final validation loss\n(nats per token)")
    losses.margins(y=0.18)
    speeds.set(ylabel="tokens per second", xlabel="batch size (sequences)", yscale="log")
    speeds.set_xscale("log", base=2)
    sizes = sorted(table["batch_size"])
    speeds.set_xticks(sizes, [f"{size:,}" for size in sizes])
    speeds.xaxis.set_minor_formatter(NullFormatter())
    speeds.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    speeds.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    speeds.yaxis.set_minor_formatter(NullFormatter())
    speeds.margins(x=0.08, y=0.15)
    return figure
