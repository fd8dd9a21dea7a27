"""Figures of the speed measurements of the reference machine: attention, steps, memory, and the ladder of gains."""

import pandas as pd
from matplotlib.figure import Figure

from lmcore.workbook.report.answers import format_bytes, format_seconds
from lmcore.workbook.report.figures import LEGEND_BESIDE, MUTED, WARNING, category_colors, panels
from lmcore.workbook.report.kernels.figures import (
    PASSES,
    by_length,
    context_ticks,
    ladder_figure,
    readable_log,
    squared,
)
from lmcore.workbook.report.kernels.speed import Speed


def speed_figures(speed: Speed | None) -> dict[str, Figure]:
    """The figures for which there are rows, by name."""
    if speed is None:
        return {}
    makers = {
        "speed_attention": ("attention", "rate", attention_rates),
        "speed_steps": ("step", "median", step_times),
        "speed_memory": ("memory", "peak_bytes", memory_by_length),
        "speed_ladder": ("study", "median", ladder),
    }
    found = {name: make(speed) for name, (group, shown, make) in makers.items() if _has(speed.of(group), shown)}
    if "speed_memory" not in found and (figure := attention_memory(speed)) is not None:
        found["speed_memory"] = figure
    return found


def _has(rows: pd.DataFrame, shown: str) -> bool:
    """Whether any row has what is shown; memory, for one, is counted on GPUs alone."""
    return bool((rows["outcome"].eq("complete") & rows[shown].notna()).any())


def with_setting(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows with these settings as columns."""
    settings = rows["settings"].tolist()
    return rows.assign(**{name: [(one or {}).get(name) for one in settings] for name in names})


def attention_rates(speed: Speed) -> Figure:
    """TFLOP/s of attention by length: a column for each head size, a row for forward alone and with the backward."""
    rows = with_setting(speed.of("attention"), "head_size", "context_length", "passes", "causal")
    rows = rows[rows["causal"].fillna(True).astype(bool)]
    sizes = sorted(rows["head_size"].unique())
    passes = [name for name in PASSES if name in set(rows["passes"])]
    names = list(dict.fromkeys(rows["contestant"]))
    figure, grid = panels(len(passes), len(sizes), 0.5 + 2.2 * len(passes), sharex=True, sharey="row")
    handles = {}
    for line, which in zip(grid, passes, strict=True):
        for axes, size in zip(line, sizes, strict=True):
            part = rows[(rows["passes"] == which) & (rows["head_size"] == size)]
            lines = {name: part[part["contestant"] == name] for name in names}
            by_length(axes, lines, "rate", log=False)
            axes.set_title(f"{PASSES[which]}, head size {size}")
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        line[0].set_ylabel("TFLOP/s")
        line[0].set_ylim(0, 1.08 * rows.loc[rows["passes"] == which, "rate"].max())
    for axes in grid.flat:
        context_ticks(axes, sorted(set(rows["context_length"])))  # the panels share their lengths
    for axes in grid[:-1].flat:
        axes.set_xlabel("")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 4))
    return figure


def step_times(speed: Speed) -> Figure:
    """Time of a whole training step by size, a dot for each contestant; what failed is said at the edge."""
    rows = speed.of("step")
    works = list(dict.fromkeys(rows["work"]))
    names = list(dict.fromkeys(rows["contestant"]))
    figure, ((axes,),) = panels(1, 1, 0.9 + 0.36 * len(works))
    for name, color in zip(names, category_colors(len(names)), strict=True):
        part = rows[(rows["contestant"] == name) & (rows["outcome"] == "complete")]
        ours = bool(len(part)) and bool(part["ours"].iloc[0])
        axes.plot(
            part["median"] / 1e3, [works.index(work) for work in part["work"]], color=color, label=name,
            marker="D" if ours else "o", markersize=6.5 if ours else 5, linestyle="none", zorder=3 if ours else 2,
        )  # fmt: skip
    for place, work in enumerate(works):
        lost = rows[(rows["work"] == work) & (rows["outcome"] != "complete")]
        words = "; ".join(f"{row['contestant']}: {row['outcome']}" for row in lost.to_dict("records"))
        axes.annotate(words, (1, place), (-2, 5), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                      ha="right", fontsize=7, color=WARNING)  # fmt: skip
    axes.set_xscale("log")
    readable_log(axes.xaxis, format_seconds)
    axes.set_yticks(range(len(works)), [work.replace(", full step", "") for work in works])
    axes.set_ylim(len(works) - 0.5, -0.5)
    axes.set_xlabel("median time of a training step")
    axes.legend(**LEGEND_BESIDE)
    return figure


def memory_by_length(speed: Speed) -> Figure:
    """Memory by length of attention alone and of a whole step, a line for each contestant."""
    rows = with_setting(speed.of("memory"), "context_length")
    kinds = {"attention": "attention, forward + backward", "step": "a whole training step"}
    parts = {kind: rows[rows["row"].str.startswith(f"memory-{kind}")] for kind in kinds}
    parts = {kind: part for kind, part in parts.items() if _has(part, "peak_bytes")}
    figure, (grid,) = panels(1, len(parts), 3.4)
    for axes, (kind, part) in zip(grid, parts.items(), strict=True):
        lines = dict(iter(part.groupby("contestant", sort=False)))
        by_length(axes, lines, "peak_bytes")
        if kind == "attention":
            squared(axes, lines.get("plain"), "peak_bytes")
        readable_log(axes.yaxis, lambda value: format_bytes(value, 1))
        axes.set_title(kinds[kind])
        axes.legend(loc="upper left")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.35)  # room for the legend
    grid[0].set_ylabel("memory beside what was there")
    return figure


def attention_memory(speed: Speed) -> Figure | None:
    """Memory of the attention rows by length, where the file has no rows of memory alone; None without a sweep.

    Dashed: one matrix of scores of every head in half precision, counted, which all of them do without.
    """
    rows = with_setting(speed.of("attention"), "head_size", "context_length", "passes", "causal", "heads", "batch_size")
    rows = rows[(rows["passes"] == "both") & rows["peak_bytes"].notna() & rows["heads"].notna()]
    lengths = rows.groupby("head_size")["context_length"].nunique()
    if not len(lengths) or lengths.max() < 3:
        return None
    rows = rows[rows["head_size"] == lengths.idxmax()]
    figure, ((axes,),) = panels(1, 1, 2.6)
    by_length(axes, dict(iter(rows.groupby("contestant", sort=False))), "peak_bytes")
    shapes = rows.drop_duplicates("context_length").sort_values("context_length")
    scores = 2 * shapes["batch_size"] * shapes["heads"] * shapes["context_length"].astype(float) ** 2
    axes.plot(shapes["context_length"], scores, color=MUTED, linestyle="--", linewidth=1, label="the scores alone")
    axes.set_title(f"attention, forward + backward, head size {lengths.idxmax()}")
    axes.set_ylabel("memory beside the inputs")
    readable_log(axes.yaxis, lambda value: format_bytes(value, 1))
    axes.legend(**LEGEND_BESIDE)
    return figure


def ladder(speed: Speed) -> Figure:
    """The study: one change after the other, as in the notebook's own ladder."""
    rows = speed.of("study")
    seconds = (rows["median"] / 1e3).where(rows["outcome"] == "complete")
    return ladder_figure(list(rows["contestant"]), seconds.tolist(), rows["outcome"].tolist())
