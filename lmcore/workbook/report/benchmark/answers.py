"""Sentences of notebook 04 on whole steps: how long they take, how that scatters, grows, and needs a warm-up."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import (
    format_count,
    format_percent,
    format_seconds,
    format_significant,
    join_words,
)
from lmcore.workbook.report.benchmark.pace import context_growth, growth_sentences, launches_set_pace
from lmcore.workbook.report.benchmark.views import (
    ALIKE,
    MISSING,
    PASSES,
    chosen,
    complete,
    failures,
    given,
    measured,
    rate,
    size_label,
    spread,
)

NOUNS = {"forward": "forward pass", "forward_backward": "forward and backward pass", "train_step": "training step"}

SMALL_VARIATION, HIGH_VARIATION = 0.02, 0.1
"""Coefficients of variation up to which timings count as steady, and from which as scattered."""


def script_answer(table: pd.DataFrame) -> str:
    """benchmarking_script (a): what the script does, and what it was made to do here."""
    clocks = "`timeit.default_timer` between two synchronizations"
    if table["cuda_median"].notna().any():
        clocks += " and by CUDA events"
    lost = len(table) - len(complete(table))
    return (
        "The script is `lmcore benchmark` (`lmcore.profiling.timing.measure` in a notebook): it makes the model from a "
        "size's name or from numbers (`--size`, or `--model.num-layers` and the like), draws a random batch, runs "
        "`--warmup-steps` steps and then times `--steps` of them, forward only, forward and backward, or with the "
        "optimizer (`--passes`), in fp32, tf32, bf16 or fp16 (`--precision`), eager or compiled (`--compile`), with "
        "plain or fused attention (`--attention`). Every option that takes several values makes a sweep. Here it "
        f"measured **{len(table) - lost} cells**{f' and found {lost} that cannot be' if lost else ''}, each in a "
        f"process of its own, on {_devices(table)}, with {_counted(table, 'warmup_steps', 'warm-up')} and "
        f"{_counted(table, 'steps', 'step')}, by {clocks}; every single step is kept."
    )


def passes_table(table: pd.DataFrame, context: int, precision: str = "fp32") -> pd.DataFrame:
    """A row for each size: mean and std of its passes, of backward and forward within one step, and their ratio.

    The backward pass is a phase of the cell with forward and backward, or of the whole step where there is no such
    cell; it is compared with the forward pass of the same steps (within_*), which keeps activations. The ratio is
    that of the two means. launches: whether the host's launches set the pace of those steps.
    """
    rows = []
    at = chosen(table, context_length=context, precision=precision)
    for _, cells in at.groupby("size", sort=False, dropna=False):
        by_passes = {row["passes"]: row for row in cells.to_dict("records")}
        any_row = next(iter(by_passes.values()))
        row = {"size": size_label(any_row), "num_parameters": any_row["num_parameters"]}
        for passes in PASSES:
            cell = by_passes.get(passes, {})
            row |= {f"{passes}_{what}": cell.get(f"wall_{what}") for what in ("mean", "std")}
            row[f"{passes}_outcome"] = cell.get("outcome")
        whole = [by_passes[p] for p in ("forward_backward", "train_step") if p in by_passes and measured(by_passes[p])]
        phases = whole[0] if whole else {}
        row |= {f"backward_{what}": phases.get(f"backward_{what}") for what in ("mean", "std")}
        row |= {f"within_{what}": phases.get(f"forward_{what}") for what in ("mean", "std")}
        row["ratio"] = phases["backward_mean"] / phases["forward_mean"] if phases else None
        row["launches"] = any(launches_set_pace(cell, table) for cell in whole)
        rows.append(row)
    return pd.DataFrame(rows)


def timings_answer(table: pd.DataFrame, context: int, precision: str = "fp32") -> str:
    """benchmarking_script (b): every size with mean ± std, what the backward pass costs, and how steady that is."""
    at = chosen(table, context_length=context, precision=precision)
    sizes = passes_table(table, context, precision)
    if not len(complete(at)):
        return f"No cell at context {context:,} in {precision} was measured. {failures(at)}".strip()
    shown = pd.DataFrame([_passes_row(row) for row in sizes.to_dict("records")])
    shown = shown[[name for name in shown if not (shown[name] == MISSING).all()]]
    counts = f"{_counted(at, 'steps', 'step')} after {_counted(at, 'warmup_steps', 'warm-up')}"
    head = (
        f"Milliseconds (mean ± standard deviation of {counts}), {precision}, context {context:,}, "
        f"batch {_values(at, 'batch_size')}, on {_devices(at)}:"
    )
    sentences = [_passes_sentence(sizes), variation_sentence(at), clocks_sentence(at), failures(at)]
    table_text = shown.to_markdown(index=False, disable_numparse=True)
    return f"{head}\n\n{table_text}\n\n{' '.join(filter(None, sentences))}"


def _passes_row(row: Mapping[str, Any]) -> dict[str, str]:
    def cell(passes: str) -> str:
        if row[f"{passes}_outcome"] in (None, "complete"):
            return spread(row[f"{passes}_mean"], row[f"{passes}_std"])
        return row[f"{passes}_outcome"]

    return {
        "size": row["size"],
        "parameters": format_count(row["num_parameters"]),
        "forward": cell("forward"),
        "forward + backward": cell("forward_backward"),
        "backward alone": spread(row["backward_mean"], row["backward_std"]),
        "forward of the same steps": spread(row["within_mean"], row["within_std"]),
        "backward / forward": f"{row['ratio']:.2f}" if given(row["ratio"]) else MISSING,
        "training step": cell("train_step"),
    }


def _passes_sentence(sizes: pd.DataFrame) -> str:
    text = []
    for name, words in (("forward", "A forward pass"), ("backward", "A backward pass")):
        done = sizes[sizes[f"{name}_mean"].notna()]
        if len(done):
            text.append(f"{words} takes {_from_to(done, f'{name}_mean', format_seconds, bold=True)}.")
    ratios = sizes[sizes["ratio"].notna()]
    if len(ratios):
        text.append(_ratio_sentence(ratios))
    return " ".join(text)


def _ratio_sentence(ratios: pd.DataFrame) -> str:
    """Backward over forward beside the two of the FLOPs, and where it is not that of the work but of its launches."""
    low, high = ratios["ratio"].min(), ratios["ratio"].max()
    text = f"The backward pass takes {_range(low, high)} times as long as the forward pass of the same steps: "
    if low >= 2 * (1 - ALIKE) and high <= 2 * (1 + ALIKE):
        return f"{text}about the two that the FLOPs say (a product has two of its size in the backward pass)."
    launched = ratios["launches"].astype(bool)
    if launched.any():
        if launched.all():
            return (
                f"{text}at each of these sizes steps scatter, or take hardly longer at the next context, as the clock "
                "times the host's launches in some or all of them, and their ratio is not the two of the FLOPs."
            )
        free = ratios[~launched]
        span = _range(free["ratio"].min(), free["ratio"].max())
        return (
            f"{text}where the GPU computes longer than the host launches ({_sizes(free)}) it is **{span}**, beside the "
            f"two of the FLOPs; in {_sizes(ratios[launched])}, whose steps scatter or take hardly longer at the next "
            "context, the clock times the host's launches in some or all steps, and their ratio is not that of the "
            "FLOPs."
        )
    side = "less than" if high < 2 else "more than" if low > 2 else "on both sides of"
    return f"{text}{side} the two that the matmul FLOPs say, which leave out all that is no matrix product."


def _sizes(table: pd.DataFrame) -> str:
    return join_words([f"`{size}`" for size in table["size"]])


def variation_sentence(table: pd.DataFrame) -> str:
    """How much the steps of a cell scatter: the middle and the worst coefficient of variation."""
    done = complete(table)
    done = done[done["wall_std"].notna()]
    if not len(done):
        return ""
    variation = (done["wall_std"] / done["wall_mean"]).astype(float)
    worst = done.loc[variation.idxmax(), "cell"]
    if len(done) == 1:
        return f"The standard deviation is {format_percent(variation.max(), 2)} of the mean."
    if variation.max() <= SMALL_VARIATION:
        verdict = "The standard deviation is small everywhere"
    elif variation.median() >= HIGH_VARIATION:
        verdict = "The timings scatter widely"
    elif variation.median() <= SMALL_VARIATION:
        verdict = "The standard deviation is small, though not everywhere"
    else:
        verdict = "The timings scatter somewhat"
    return (
        f"{verdict}: {format_percent(variation.median(), 2)} of the mean in the middle of the cells, "
        f"{format_percent(variation.max(), 2)} in the worst one, `{worst}`."
    )


def clocks_sentence(table: pd.DataFrame) -> str:
    """How far the two clocks are apart; where there is but one, that."""
    done = complete(table)
    both = done[done["cuda_median"].notna()]
    if not len(both):
        return "There is no CUDA device, so there is one clock here, that of the host." if len(done) else ""
    apart = (both["wall_median"] - both["cuda_median"]).astype(float)
    share = apart / both["wall_median"].astype(float)
    worst = both.loc[share.abs().idxmax()]
    most, where = format_percent(share.abs().max(), 2), f"`{worst['cell']}`"
    if share.abs().max() <= ALIKE:
        verdict = (
            f"The clocks agree: the host's differs from CUDA events by at most {format_seconds(apart.abs().max())}, "
            f"and by at most {most} ({where})"
        )
    else:
        verdict = f"The clocks differ by up to {most} ({where}, {format_seconds(abs(apart[worst.name]))})"
    return f"{verdict}; the host's also holds the launch of the first kernel and the news of the last one's end."


def contexts_answer(table: pd.DataFrame, passes: str = "forward", precision: str = "fp32") -> str:
    """How time grows with the context, beside tokens and FLOPs, for each size that was measured at two or more."""
    at = complete(chosen(table, passes=passes, precision=precision))
    lost = failures(chosen(table, passes=passes, precision=precision))
    rows = context_growth(at)
    if not len(rows):
        return f"No size was measured at more than one context. {lost}".strip()
    shown = pd.DataFrame(
        {
            "size": rows["size"],
            "from": [f"{value:,}" for value in rows["first"]],
            "to": [f"{value:,}" for value in rows["last"]],
            "time there": [f"{format_seconds(row.start)} → {format_seconds(row.end)}" for row in rows.itertuples()],
            **{name: [f"{format_significant(value, 2)} ×" for value in rows[name]] for name in ("tokens", "FLOPs")},
            "time": [f"{format_significant(value, 2)} ×" for value in rows["time"]],
        }
    )
    if rows["without"].notna().any():
        shown["time without optimizer"] = [
            f"{format_significant(value, 2)} ×" if given(value) else MISSING for value in rows["without"]
        ]
    text = shown.to_markdown(index=False, disable_numparse=True)
    head = f"A {NOUNS[passes]} in {precision}, at the shortest and at the longest context that were measured:"
    return f"{head}\n\n{text}\n\n{growth_sentences(rows)} {lost}".strip()


def utilization_answer(table: pd.DataFrame, context: int, passes: str) -> str:
    """Achieved FLOP/s, and their share of the chip's dense peak, by size and precision."""
    at = chosen(table, context_length=context, passes=passes)
    done = complete(at)
    if not len(done):
        return f"No {NOUNS[passes]} at context {context:,} was measured. {failures(at)}".strip()
    shown = pd.DataFrame(
        {"size": size_label(cells.iloc[0]), **{row["precision"]: _utilization(row) for row in cells.to_dict("records")}}
        for _, cells in at.groupby("size", sort=False, dropna=False)
    ).fillna(MISSING)
    best = done.loc[done["flops_per_second"].astype(float).idxmax()]
    text = (
        f"Matmul FLOPs of a {NOUNS[passes]} at context {context:,} over its median time"
        f"{', in brackets MFU' if done['mfu'].notna().any() else ''}:\n\n"
        f"{shown.to_markdown(index=False, disable_numparse=True)}\n\nThe most is **{rate(best['flops_per_second'])}**, "
        f"`{size_label(best)}` in {best['precision']}."
    )
    known = done[done["mfu"].notna()]
    if not len(known):
        return f"{text} No peak is known for this device ({_devices(done)}), and so no MFU is given."
    clauses = [
        f"{precision}: {_from_to(cells, 'mfu', lambda share: format_percent(share, 2))}"
        for precision, cells in known.groupby("precision", sort=False)
    ]
    return f"{text} MFU, of the dense peak of each precision: {'; '.join(clauses)}. {failures(at)}".strip()


def _utilization(row: Mapping[str, Any]) -> str:
    if not measured(row):
        return row["outcome"]
    share = f" ({format_percent(row['mfu'], 2)})" if given(row["mfu"]) else ""
    return f"{rate(row['flops_per_second'])}{share}"


def _from_to(table: pd.DataFrame, column: str, form: Any, bold: bool = False) -> str:
    """The lowest and the highest value of a column, with the sizes that they are of."""
    mark = "**" if bold else ""

    def value(row: pd.Series) -> str:
        return f"{mark}{form(row[column])}{mark} (`{size_label(row)}`)"

    values = table[column].astype(float)
    low, high = table.loc[values.idxmin()], table.loc[values.idxmax()]
    return value(low) if len(table) == 1 else f"from {value(low)} to {value(high)}"


def _range(low: float, high: float) -> str:
    low_text, high_text = f"{low:.2f}", f"{high:.2f}"
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _devices(table: pd.DataFrame) -> str:
    return join_words(sorted({device for device in table["device"] if given(device)})) or "an unknown device"


def _values(table: pd.DataFrame, column: str) -> str:
    return join_words([f"{value:,}" for value in sorted(set(table[column]))], "or")


def _counted(table: pd.DataFrame, column: str, thing: str) -> str:
    return f"{_values(table, column)} {thing}{'' if table[column].max() == 1 else 's'}"
