"""What warm-up steps are for, from measurements with none, one, two and more of them (benchmarking_script (c))."""

from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import format_count, format_significant, join_words
from lmcore.workbook.report.benchmark.views import ALIKE, complete, failures, given, size_label, spread

COSTLY = 1.5
"""How many times a settled step the first one must take to be called costly."""

SMALL_SPREAD = 0.01
"""Share of the mean up to which a standard deviation or a difference of means says nothing."""


def settled_at(seconds: pd.Series) -> int:
    """The first step, from 1, that takes no more than the settled ones: the median of the later half, and a tenth."""
    values = seconds.astype(float).tolist()
    settled = pd.Series(values[len(values) // 2 :]).median()
    return next(number for number, value in enumerate(values, 1) if value <= (1 + ALIKE) * settled)


def warmup_table(table: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """A row for each size and number of warm-ups: mean, std, median, and the first measured step over the median."""
    rows = []
    for row in complete(table).sort_values(["num_parameters", "warmup_steps"]).to_dict("records"):
        steps = samples[(samples["cell"] == row["cell"]) & ~samples["warmup"].astype(bool)]
        rows.append(
            {
                "size": size_label(row),
                "warmup_steps": row["warmup_steps"],
                "mean": row["wall_mean"],
                "std": row["wall_std"],
                "median": row["wall_median"],
                "first": steps["wall"].iloc[0] / row["wall_median"],
            }
        )
    return pd.DataFrame(rows, columns=["size", "warmup_steps", "mean", "std", "median", "first"])


def warmup_answer(table: pd.DataFrame, samples: pd.DataFrame) -> str:
    """benchmarking_script (c): what warm-ups change, what the first steps cost, and what they do besides computing."""
    rows = warmup_table(table, samples)
    if not len(rows):
        return f"No cell was measured. {failures(table)}".strip()
    shown = pd.DataFrame(
        {
            "size": rows["size"],
            "warm-ups": rows["warmup_steps"].astype(str),
            "mean ± std (ms)": [spread(*pair) for pair in zip(rows["mean"], rows["std"], strict=True)],
            "median (ms)": [spread(value, None) for value in rows["median"]],
            "first measured step / median": [format_significant(value) for value in rows["first"]],
        }
    ).to_markdown(index=False, disable_numparse=True)
    sentences = [_without(part) for _, part in rows.groupby("size", sort=False)]
    sentences += [few_sentence(part) for _, part in rows.groupby("size", sort=False)]
    sentences += [_evidence(complete(table), samples), _why(complete(table)), failures(table)]
    return f"{shown}\n\n{' '.join(filter(None, sentences))}"


def _without(rows: pd.DataFrame) -> str:
    """None against the most warm-ups, of one size."""
    none, most = rows[rows["warmup_steps"] == 0], rows.iloc[-1]
    if not len(none) or most["warmup_steps"] == 0:
        return ""
    none = none.iloc[0]
    first = f"`{most['size']}`: without a warm-up the first step takes **{format_significant(none['first'], 2)} times**"
    if none["first"] < COSTLY:
        return f"{first} the median, so that here it hardly matters."
    mean, median = (format_significant(none[name] / most[name]) for name in ("mean", "median"))
    scatter = ""
    if given(none["std"]) and given(most["std"]) and most["std"] > 0:
        scatter = f", the standard deviation {format_significant(none['std'] / most['std'], 2)} times"
    after = f"what they are after {most['warmup_steps']}"
    return f"{first} the median; the mean is {mean} times{scatter} and the median {median} times {after}."


def few_sentence(rows: pd.DataFrame) -> str:
    """One or two warm-ups against the most, of one size."""
    most = rows.iloc[-1]
    few = rows[(rows["warmup_steps"] > 0) & (rows["warmup_steps"] < most["warmup_steps"])]
    clauses, changes = [], []
    for row in few.to_dict("records"):
        change = row["mean"] / most["mean"] - 1
        changes.append(change)
        clause = f"{'above' if change > 0 else 'below'} it by {abs(change):.1%} after {row['warmup_steps']}"
        spreads = [row["std"], most["std"]]
        if all(map(given, spreads)) and min(spreads) > 0 and max(spreads) > SMALL_SPREAD * most["mean"]:
            clause += f" (standard deviation {format_significant(row['std'] / most['std'], 2)} times as large)"
        clauses.append(clause)
    if not clauses:
        return ""
    text = f"Against the mean after {most['warmup_steps']} warm-ups, that of `{most['size']}` is {join_words(clauses)}."
    if min(changes) < -SMALL_SPREAD and max(changes) > SMALL_SPREAD:
        text += " As both occur, it is the processes that differ there, not the warm-ups."
    return text


def _evidence(table: pd.DataFrame, samples: pd.DataFrame) -> str:
    """Which step settles, and what the steps before it asked of the allocator, or of the system's memory."""
    sentences = []
    for row in table[table["warmup_steps"] == 0].to_dict("records"):
        steps = samples[samples["cell"] == row["cell"]].sort_values("step")
        if len(steps) < 4:
            continue
        number = settled_at(steps["wall"])
        text = f"`{size_label(row)}` settles at step {number}"
        column, what = "device_allocations", "the allocator asked the driver for memory"
        if steps[column].isna().all():
            column, what = "page_faults", "the process touched new pages of memory"
        if steps[column].notna().all():
            counts = [int(value) for value in steps[column]]
            last = pd.Series(counts[len(counts) // 2 :]).median()
            text += (
                f": {what} {_times(counts[0])} in the first step, {_times(counts[1])} in the second, "
                f"{_times(last)} in the middle of the later ones"
            )
        sentences.append(f"{text}.")
    return " ".join(sentences)


def _times(count: float) -> str:
    count = round(count)
    return {0: "never", 1: "once"}.get(count, f"{format_count(count)} times")


def _why(table: pd.DataFrame) -> str:
    """What a first step does on such a device that later ones need not. The model is on the device before it."""
    causes: list[Any] = []
    if table["compile"].any():
        causes.append("compiles the model")
    if table["cuda_median"].notna().any():
        causes += [
            "loads the code of each kernel when it is first called",
            "makes cuBLAS's handles and workspace and has it choose algorithms for each shape",
            "gets from the driver the memory that the allocator then keeps",
            "finds the GPU at the clocks of an idle one",
        ]
        grown = "gradients and the optimizer's moments" if (table["passes"] == "train_step").any() else "what it kept"
        later = (
            f"A second step finds {grown} in memory and may still ask for more, and the clocks take longer than a step "
            "to rise: one or two warm-ups can still give another result."
        )
    else:
        causes += [
            "starts the threads that compute",
            "loads code and prepares kernels for each shape",
            "touches memory that the system must first provide",
            "fills the caches",
        ]
        later = (
            "The allocator and the system need some steps before they hand out the same memory again, and clocks and "
            "other programs change in the meantime: one or two warm-ups can still give another result."
        )
    context = "The model is on the device before, so making a CUDA context is not in these times. "
    return (
        f"{context if table['cuda_median'].notna().any() else ''}A first step {join_words(causes)}; later ones find "
        f"that done. {later}"
    )
