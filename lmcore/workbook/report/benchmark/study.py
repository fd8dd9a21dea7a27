"""Sentences of notebook 04 on the optimisation report: throughput and memory by batch size and by context."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lmcore.workbook.report.answers import (
    format_bytes,
    format_count,
    format_percent,
    format_significant,
    join_words,
)
from lmcore.workbook.report.benchmark.fit import fitted
from lmcore.workbook.report.benchmark.published import PUBLISHED, is_published_setting

ALIKE = 0.02
"""Relative differences up to this are called no difference."""

GOOD_FIT = 0.05
"""Largest relative residual up to which memory is said to follow a fitted curve."""


def done(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that were measured to the end."""
    return table[table["outcome"] == "complete"]


def has_memory(table: pd.DataFrame) -> bool:
    """Whether any row knows its peak memory: a GPU's allocator counts it, a CPU's does not."""
    return bool(table["peak_memory_bytes"].notna().any())


def _missing(table: pd.DataFrame, what: str) -> str:
    """Which rows were not measured, and why, in words; empty if all were."""
    clauses = []
    for outcome, rows in table[table["outcome"] != "complete"].groupby("outcome"):
        cells = join_words([f"{row[what]:,} ({row['precision']})" for row in rows.to_dict("records")])
        clauses.append(f"{what.replace('_', ' ')} {cells}: {outcome}")
    return f"Without a measurement: {'; '.join(clauses)}." if clauses else ""


NO_MEMORY = "The peak of memory is counted on a GPU only, and is not known here."


def compared(table: pd.DataFrame, base: str = "fp32") -> pd.DataFrame:
    """Each precision against `base` at equal batch size and context: batch_size, precision, speedup, saving.

    speedup is a ratio of tokens per second; saving the share of the peak memory that is saved, None where unknown.
    """
    rows = done(table)
    keys = ["batch_size", "context_length"]
    pairs = rows[rows["precision"] != base].merge(rows[rows["precision"] == base], on=keys, suffixes=("", "_base"))
    memory, base_memory = (pairs[f"peak_memory_bytes{end}"].astype(float) for end in ("", "_base"))
    return pd.DataFrame(
        {
            "batch_size": pairs["batch_size"],
            "precision": pairs["precision"],
            "speedup": pairs["tokens_per_second"] / pairs["tokens_per_second_base"],
            "saving": 1 - memory / base_memory,
        }
    )


def batch_answer(table: pd.DataFrame, base: str = "fp32") -> str:
    """Throughput and memory by batch size: what half precision buys, how both grow, and what the report found."""
    rows = done(table)
    if not len(rows):
        return f"No cell was measured, so nothing can be said. {_missing(table, 'batch_size')}"
    text = [f"On {join_words(sorted(set(rows['device'])))}, at a context of {_one(rows['context_length'])}:"]
    pairs = compared(table, base)
    text += [_precision_sentence(part, kind, base) for kind, part in pairs.groupby("precision", sort=False)]
    text += [_throughput_growth(part, kind) for kind, part in rows.groupby("precision", sort=False)]
    if has_memory(rows):
        text += [_memory_growth(part, kind) for kind, part in rows.groupby("precision", sort=False)]
    else:
        text.append(NO_MEMORY)
    if is_published_setting(rows, context_length="batch_context"):
        text.append(_against_published(pairs[pairs["precision"] == "fp16"]))
    text.append(_missing(table, "batch_size"))
    return " ".join(part for part in text if part)


def _precision_sentence(pairs: pd.DataFrame, precision: str, base: str) -> str:
    text = f"**{precision}** reaches {_span(pairs['speedup'])} times the throughput of {base}"
    saving = pairs["saving"].dropna()
    if len(saving):
        low, high = saving.min(), saving.max()
        if low >= 0:
            text += f" and saves {_percent_span(low, high)} of the peak memory"
        elif high < 0:
            text += f" and needs {_percent_span(-high, -low)} more memory"
        else:
            ends = [pairs.loc[pairs["saving"] == value, "batch_size"].iloc[0] for value in (low, high)]
            text += (
                f"; its peak memory is {format_percent(-low, 2)} higher at batch size {ends[0]:,} and "
                f"{format_percent(high, 2)} lower at {ends[1]:,}"
            )
    slower = pairs.loc[pairs["speedup"] < 1 - ALIKE, "batch_size"].tolist()
    if slower:
        text += f"; it is slower at batch size {join_words([f'{size:,}' for size in slower])}"
    return f"{text} (batch sizes {_numbers(pairs['batch_size'])})."


def _throughput_growth(rows: pd.DataFrame, precision: str) -> str:
    rows = rows.sort_values("batch_size")
    if len(rows) < 2:
        return ""
    first, last = rows.iloc[0], rows.iloc[-1]
    best = rows.loc[rows["tokens_per_second"].idxmax()]
    gain = best["tokens_per_second"] / first["tokens_per_second"]
    if gain < 1 + ALIKE:
        return f"Larger batches do not raise the throughput of {precision}."
    enough = rows[rows["tokens_per_second"] >= 0.9 * best["tokens_per_second"]].iloc[0]
    text = (
        f"In {precision}, throughput rises from {_rate(first)} at batch size {first['batch_size']:,} to {_rate(best)} "
        f"at {best['batch_size']:,}"
    )
    if enough["batch_size"] < best["batch_size"]:
        text += f", and comes within a tenth of that at {enough['batch_size']:,}"
    if last["tokens_per_second"] < (1 - ALIKE) * best["tokens_per_second"]:
        text += f"; at {last['batch_size']:,} it is lower again, {_rate(last)}"
    return text + "."


def _memory_growth(rows: pd.DataFrame, precision: str) -> str:
    rows = rows.dropna(subset="peak_memory_bytes").sort_values("batch_size")
    if len(rows) < 3:
        return ""
    fit = fitted(rows["batch_size"], rows["peak_memory_bytes"], degree=1)
    if fit.residual > GOOD_FIT:
        return (
            f"Peak memory in {precision} is not a straight line in the batch size (a fit is off by up to "
            f"{format_percent(fit.residual, 2)})."
        )
    fixed, each = fit.coefficients
    return (
        f"Peak memory in {precision} grows linearly, by {format_bytes(each)} for each sequence on top of "
        f"{format_bytes(max(fixed, 0))}."
    )


def _against_published(pairs: pd.DataFrame) -> str:
    if not len(pairs):
        return ""
    facts = PUBLISHED
    speed = _range_verdict(pairs["speedup"], facts["speedup_low"], facts["speedup_high"])
    savings = f"{format_percent(facts['saving_low'], 2)} to {format_percent(facts['saving_high'], 2)}"
    text = (
        f"The report found FP16 {facts['speedup_low']:g} to {facts['speedup_high']:g} times as fast as FP32 on "
        f"{facts['machine']}, with {savings} less memory: the speed-ups here {speed}"
    )
    saving = pairs["saving"].dropna()
    if len(saving):
        text += f", the savings {_range_verdict(saving, facts['saving_low'], facts['saving_high'])}"
    return text + "."


def _range_verdict(values: pd.Series, low: float, high: float) -> str:
    if ((values >= low) & (values <= high)).all():
        return "agree with that"
    if (values < low).all():
        return "are smaller throughout"
    if (values > high).all():
        return "are larger throughout"
    return "reach beyond that range" if values.max() > high else "fall short of it in part"


def context_answer(table: pd.DataFrame) -> str:
    """Memory and throughput by context at one batch size, and how much of the growth is the score matrices'."""
    rows = done(table).sort_values("context_length")
    if not len(rows):
        return f"No cell was measured, so nothing can be said. {_missing(table, 'context_length')}"
    last, first = rows.iloc[-1], rows.iloc[0]
    text = [
        f"On {join_words(sorted(set(rows['device'])))} in {_one(rows['precision'])}, at batch size "
        f"{_one(rows['batch_size'])}:"
    ]
    if len(rows) > 1:
        ratio = last["tokens_per_second"] / first["tokens_per_second"]
        word = "hardly changes," if abs(ratio - 1) <= ALIKE else ("rises" if ratio > 1 else "falls")
        text.append(
            f"throughput {word} from {format_rate(first['tokens_per_second'])} at {first['context_length']:,} to "
            f"{_rate(last)} at {last['context_length']:,}{_best_between(rows)}."
        )
    text.append(_context_memory(rows) if has_memory(rows) else NO_MEMORY)
    text.append(_missing(table, "context_length"))
    return " ".join(part for part in text if part)


def _best_between(rows: pd.DataFrame) -> str:
    """Where throughput is highest, if that is at neither end of the contexts."""
    best, ends = rows.loc[rows["tokens_per_second"].idxmax()], rows["tokens_per_second"].iloc[[0, -1]]
    if best["tokens_per_second"] <= (1 + ALIKE) * ends.max():
        return ""
    return f", and is highest at {best['context_length']:,} ({_rate(best)})"


def _context_memory(rows: pd.DataFrame) -> str:
    rows = rows.dropna(subset="peak_memory_bytes")
    listed = join_words(
        [f"{format_bytes(row['peak_memory_bytes'])} at {row['context_length']:,}" for row in rows.to_dict("records")]
    )
    text = [f"Peak memory is {listed}."]
    if len(rows) > 1:
        before, last = rows.iloc[-2], rows.iloc[-1]
        exponent = np.log(last["peak_memory_bytes"] / before["peak_memory_bytes"]) / np.log(
            last["context_length"] / before["context_length"]
        )
        text.append(
            f"Between the last two it grows with the power {format_significant(exponent, 2)} of the context "
            "(1 is linear, 2 quadratic)."
        )
    text.append(_quadratic(rows))
    if is_published_setting(rows, batch_size="context_batch"):
        text.append(_published_context(rows))
    return " ".join(part for part in text if part)


def _quadratic(rows: pd.DataFrame) -> str:
    """Fixed, linear and quadratic part of the memory, and the quadratic one in score matrices."""
    if len(rows) < 4:
        return "Fewer than four contexts fitted, too few to tell a linear from a quadratic part."
    fit = fitted(rows["context_length"], rows["peak_memory_bytes"], degree=2)
    fixed, linear, square = fit.coefficients
    if fit.residual > GOOD_FIT:
        return f"No sum of a fixed, a linear and a quadratic part describes it within {format_percent(GOOD_FIT, 1)}."
    last = rows.iloc[-1]
    context, memory = last["context_length"], last["peak_memory_bytes"]
    share = square * context**2 / memory
    if share < ALIKE:
        return f"A fit finds no quadratic part: {format_bytes(linear)} for each position of the context."
    pairs = last["batch_size"] * last["num_heads"] * last["num_layers"]
    return (
        f"A fit of a fixed, a linear and a quadratic part (within {format_percent(max(fit.residual, 1e-3), 1)}) puts "
        f"{format_percent(max(fixed, 0) / memory, 2)}, {format_percent(max(linear, 0) * context / memory, 2)} and "
        f"{format_percent(share, 2)} of the peak at {context:,} on them. Quadratic are the (context × context) score "
        f"matrices alone, one for each of {last['num_heads']:,} heads, {last['num_layers']:,} layers and "
        f"{last['batch_size']:,} sequences: the fit amounts to {format_significant(square / pairs, 2)} bytes for each "
        f"score. {_kept_for_each_score(last['precision'])}"
    )


def _kept_for_each_score(precision: str) -> str:
    """What plain attention (`lmcore.functional.softmax`) keeps of a score until the backward pass."""
    width = 2 if precision in ("fp16", "bf16") else 4
    return (
        "For the backward pass plain attention keeps the exponentials, in float32 (4 bytes), and the probabilities "
        f"as the second product takes them, in {precision} ({width} bytes)."
    )


def _published_context(rows: pd.DataFrame) -> str:
    """How the growth between two contexts compares with the report's, where both were measured."""
    known = PUBLISHED["context_memory"]
    here = {row["context_length"]: row["peak_memory_bytes"] for row in rows.to_dict("records")}
    shared = [context for context in known if context in here]
    if len(shared) < 2:
        return ""
    low, high = shared[0], shared[-1]
    ours, theirs = here[high] / here[low], known[high] / known[low]
    verdict = "agrees" if abs(ours / theirs - 1) <= 0.2 else ("is steeper" if ours > theirs else "is flatter")
    return (
        f"From {low:,} to {high:,} that is {format_significant(ours, 2)} times as much; the report's "
        f"{format_bytes(known[low], 2)} to {format_bytes(known[high], 2)} is {format_significant(theirs, 2)} times: "
        f"the growth here {verdict}."
    )


def _rate(row: Mapping) -> str:
    return f"{format_rate(row['tokens_per_second'])} tokens/s"


def format_rate(value: float) -> str:
    """Tokens per second to three digits, whole numbers too: 23,200."""
    return format_count(float(f"{value:.3g}"))


def _one(values: pd.Series) -> str:
    return join_words([f"{value:,}" if not isinstance(value, str) else value for value in dict.fromkeys(values)])


def _numbers(values: pd.Series) -> str:
    return join_words([f"{value:,}" for value in sorted(set(values))])


def _span(values: pd.Series) -> str:
    low, high = format_significant(values.min(), 2), format_significant(values.max(), 2)
    return low if low == high else f"{low} to {high}"


def _percent_span(low: float, high: float) -> str:
    low, high = format_percent(low, 2), format_percent(high, 2)
    return low if low == high else f"{low} to {high}"
