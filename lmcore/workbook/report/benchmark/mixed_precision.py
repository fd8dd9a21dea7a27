"""Table and sentences of notebook 04 on what mixed precision buys, size by size."""

import itertools

import pandas as pd

from lmcore.workbook.report.answers import format_seconds, format_significant, join_words, scientific
from lmcore.workbook.report.benchmark.pace import launches_set_pace
from lmcore.workbook.report.benchmark.views import given, markdown

ALIKE = 0.03
"""Relative difference of times up to which neither is called faster."""

PASSES = {"forward": "forward", "forward_backward": "forward and backward"}


def speedup_table(table: pd.DataFrame, precision: str = "bf16") -> pd.DataFrame:
    """fp32 against `precision` from a timing table: a row for each size, context, batch and passes, narrow sizes first.

    Columns: size, num_parameters, d_model, context_length, batch_size, passes, full and mixed (median seconds by the
    wall clock, None unless complete), full_outcome and mixed_outcome, full_rate and mixed_rate (FLOP/s), speedup,
    device, cuda (whether a GPU ran), launched (whether the host's launches set the pace of the mixed cell). Plain
    attention without checkpointing or compilation only, and of repeated cells the one with the longest warm-up.
    """
    plain = table[(~table["compile"].astype(bool)) & (table["attention"] == "plain") & table["checkpoint_every"].isna()]
    plain = plain.sort_values("warmup_steps", ascending=False, kind="stable")
    keys = ["size", "context_length", "batch_size", "passes"]
    rows = []
    for key, part in plain[plain["passes"].isin(PASSES)].groupby(keys, dropna=False, sort=False):
        pair = {name: part[part["precision"] == kind] for name, kind in (("full", "fp32"), ("mixed", precision))}
        if not len(pair["full"]) or not len(pair["mixed"]):
            continue
        sample = part.iloc[0]
        row = dict(zip(keys, key, strict=True)) | {
            "num_parameters": part["num_parameters"].max(),
            "d_model": part["d_model"].max(),
            "device": sample["device"],
            "cuda": any(given(other.get("cuda_median")) for other in part.to_dict("records")),
            "launched": launches_set_pace(pair["mixed"].iloc[0].to_dict(), plain),
        }
        for name, found in pair.items():
            done = found[found["outcome"] == "complete"]
            row[f"{name}_outcome"] = found.iloc[0]["outcome"]
            row[name] = done.iloc[0]["wall_median"] if len(done) else None
            row[f"{name}_rate"] = done.iloc[0]["flops_per_second"] if len(done) else None
        row["speedup"] = row["full"] / row["mixed"] if row["full"] and row["mixed"] else None
        rows.append(row)
    columns = [*keys, "num_parameters", "d_model", "full", "mixed", "full_outcome", "mixed_outcome"]
    columns += ["full_rate", "mixed_rate", "speedup", "device", "cuda", "launched"]
    return pd.DataFrame(rows, columns=columns).sort_values(["d_model", "num_parameters", "context_length", "passes"])


def mixed_precision_answer(table: pd.DataFrame, precision: str = "bf16") -> str:
    """benchmarking_mixed_precision (c): timings of every size with and without mixed precision, and the trend."""
    pairs = speedup_table(table, precision)
    done = pairs.dropna(subset="speedup")
    if not len(pairs):
        return f"Nothing was timed both in fp32 and in {precision}, so there is nothing to compare."
    context = _context(done if len(done) else pairs)
    shown = markdown([_speedup_row(row, precision) for row in pairs.to_dict("records")])
    if not len(done):
        return f"{shown}\n\nNo size was timed both ways, so no speed-up is known."
    here = done[done["context_length"] == context]
    text = [f"On {join_words(sorted(set(done['device'])))}, at a context of {context:,.0f}:"]
    text += [_trend(here[here["passes"] == passes], passes, precision) for passes in PASSES]
    text.append(_why(here, precision))
    text.append(_only_mixed(pairs[pairs["context_length"] == context], precision))
    return f"{shown}\n\n{' '.join(part for part in text if part)}"


def _context(pairs: pd.DataFrame) -> int:
    """The context at which most sizes were compared; the longest of several."""
    counts = pairs.groupby("context_length")["size"].nunique()
    return counts[counts == counts.max()].index.max()


def _speedup_row(row: dict, precision: str) -> dict[str, str]:
    def time(name: str) -> str:
        return row[f"{name}_outcome"] if pd.isna(row[name]) else format_seconds(row[name])

    return {
        "size": row["size"],
        "context": f"{row['context_length']:,}",
        "passes": PASSES[row["passes"]],
        "fp32": time("full"),
        precision: time("mixed"),
        "speed-up": "" if pd.isna(row["speedup"]) else f"{format_significant(row['speedup'])}×",
    }


def _trend(rows: pd.DataFrame, passes: str, precision: str) -> str:
    if not len(rows):
        return ""
    name, speedups = PASSES[passes].capitalize(), rows["speedup"].tolist()
    if len(rows) == 1:
        return f"{name}, {precision} {_verdict(speedups[0])} ({rows.iloc[0]['size']}, the only size compared)."
    first, last = rows.iloc[0], rows.iloc[-1]
    ends = (
        f"from {format_significant(first['speedup'])}× ({first['size']}) to {format_significant(last['speedup'])}× "
        f"({last['size']})"
    )
    steps = [b / a for a, b in itertools.pairwise(speedups)]
    if max(speedups) / min(speedups) - 1 <= ALIKE:
        course = f"is the same for every size, {format_significant(speedups[0])}×"
    elif all(step > 1 for step in steps):
        course = f"grows with every size, {ends}"
    elif all(step < 1 for step in steps):
        course = f"falls with every size, {ends}"
    else:
        best = rows.loc[rows["speedup"].idxmax()]
        course = f"goes {ends}, but not steadily; it is largest for {best['size']} ({best['speedup']:.2f}×)"
    slower = rows.loc[rows["speedup"] < 1 - ALIKE, "size"].tolist()
    tail = f"; {join_words(slower)} {'is' if len(slower) == 1 else 'are'} slower in {precision}" if slower else ""
    return f"{name}, the speed-up by {precision} {course}{tail}."


def _only_mixed(pairs: pd.DataFrame, precision: str) -> str:
    """Sizes that fit into the memory in mixed precision only."""
    saved = pairs[(pairs["full_outcome"] == "out of memory") & (pairs["mixed_outcome"] == "complete")]
    sizes = list(dict.fromkeys(saved["size"]))
    return f"In {precision} alone {join_words(sizes)} fits into the memory." if sizes else ""


def _verdict(speedup: float) -> str:
    if abs(speedup - 1) <= ALIKE:
        return "makes no difference"
    word = "faster" if speedup > 1 else "slower"
    return f"is {format_significant(max(speedup, 1 / speedup))} times {word}"


def _why(rows: pd.DataFrame, precision: str) -> str:
    """What the achieved rates say: where they grow with the size, large matrix products are what gains."""
    launched = list(dict.fromkeys(rows.loc[rows["launched"] & (rows["speedup"] < 1 - ALIKE), "size"]))
    casts = (
        "Autocast adds casts, and so launches, to most operands: where launches set the pace "
        f"({join_words(launched)}), that can make {precision} the slower."
        if launched
        else ""
    )
    rows = rows[rows["passes"] == "forward"] if (rows["passes"] == "forward").any() else rows
    rated = rows.dropna(subset=["full_rate", "mixed_rate"])
    if (rows["speedup"] < 1 - ALIKE).all():
        return casts or (
            f"Autocast adds a cast before every product; where {precision} products are not faster than fp32 ones on "
            "a device, that is a loss."
        )
    if len(rated) < 2:
        return casts
    first, last = rated.iloc[0], rated.iloc[-1]
    growth = {name: last[f"{name}_rate"] / first[f"{name}_rate"] for name in ("full", "mixed")}
    rates = ", ".join(
        f"{label} from {scientific(first[f'{name}_rate'])} to {scientific(last[f'{name}_rate'])} FLOP/s"
        for name, label in (("full", "fp32"), ("mixed", precision))
    )
    text = f"From {first['size']} to {last['size']} the achieved rate of the forward pass goes, {rates}."
    if growth["mixed"] > growth["full"] * (1 + ALIKE):
        cores = f": fp32 ones run on the ordinary (CUDA) cores, {precision} ones on tensor cores"
        text += (
            f" Matrix products gain most from {precision}{cores if rows['cuda'].any() else ''}; the softmax and the "
            "sums of norms stay in float32, and weights are cast: the wider the model, the smaller the share of these."
        )
    return f"{text} {casts}".strip()
