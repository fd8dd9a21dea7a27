"""Sentences of notebook 07 on attention: what eager attention moves, what ours takes, and how well it agrees."""

from collections.abc import Mapping

import pandas as pd

from lmcore.config import ModelConfig
from lmcore.profiling.kernels.cases import attention_layer
from lmcore.profiling.kernels.measuring import DTYPES
from lmcore.workbook.report.answers import (
    format_bytes,
    format_count,
    format_seconds,
    format_significant,
    join_words,
    scientific,
)
from lmcore.workbook.report.benchmark.views import MISSING, given, rate
from lmcore.workbook.report.kernels.figures import KINDS


def eager_answer(model: ModelConfig, batch_size: int, precision: str, roofs: Mapping[str, float]) -> str:
    """Bytes that eager attention moves against the least, FLOPs per byte, and where that lies on this roofline.

    `roofs` holds `peak_flops_per_second` and `peak_bytes_per_second`, as measured (`lmcore.profiling.peak_rates`).
    """
    dtype = DTYPES[precision]
    scores = batch_size * model.num_heads * model.context_length**2
    layer = attention_layer(model, batch_size, dtype)
    eager, training = layer.forward.moved().total, layer.moved().total
    least, flops = layer.least_bytes, layer.flops
    peak, bandwidth = roofs["peak_flops_per_second"], roofs["peak_bytes_per_second"]
    ridge = peak / bandwidth
    return (
        f"One layer of {model.num_heads} heads of size {model.d_k} at batch {batch_size:,} and context "
        f"{model.context_length:,} has {format_count(scores)} scores, {format_bytes(scores * dtype.itemsize)} in "
        f"{precision}. The forward pass moves **{format_bytes(eager)}**, {format_significant(eager / scores)} bytes "
        f"for each score, as every operation reads and writes the whole matrix; with the backward pass it is "
        f"{format_bytes(training)}. Queries, keys, values and outputs are {format_bytes(least)}: "
        f"**{format_significant(eager / least)} times less**.\n\n"
        f"The causal products take {format_count(flops)} FLOPs, so eager attention has "
        f"{format_significant(flops / eager)} FLOPs per byte, and attention that keeps its scores on the chip up to "
        f"{format_significant(flops / least)}. This machine's ridge is at {format_significant(ridge)} FLOPs per byte "
        f"({rate(peak)} by {format_significant(bandwidth / 1e9)} GB/s, measured): eager attention is "
        f"{_side(flops / eager, ridge)}, the other {_side(flops / least, ridge)}. Its time is at least "
        f"{format_seconds(roofline_seconds(flops, eager, peak, bandwidth))} here, that of the other "
        f"{format_seconds(roofline_seconds(flops, least, peak, bandwidth))}."
    )


def roofline_seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """The least time by the roofline: computing or moving, whichever takes longer."""
    return max(flops / peak, moved / bandwidth)


def _side(intensity: float, ridge: float) -> str:
    return "bound by memory" if intensity < ridge else "bound by arithmetic"


def attention_answer(table: pd.DataFrame) -> str:
    """Time and memory of each kind of attention by length as a table, what grows how, and ours against the others."""
    if not len(table):
        return "No attention was measured."
    both = table[table["passes"] == "both"]
    shown = pd.DataFrame([_row(part) for _, part in table.groupby("context_length")])
    head = both.iloc[0]
    intro = (
        f"On {head['device']} in {head['precision']}, {head['num_heads']} heads of size {head['d_k']}, batch "
        f"{head['batch_size']:,}; median times of forward and backward pass together, and the most memory beside "
        "queries, keys and values:"
    )
    sentences = [_lost(both), _growth(both), _against(both)]
    return f"{intro}\n\n{shown.to_markdown(index=False, disable_numparse=True)}\n\n{' '.join(filter(None, sentences))}"


def _row(rows: pd.DataFrame) -> dict[str, str]:
    both = rows[rows["passes"] == "both"].set_index("attention")
    cells = {"context": f"{rows['context_length'].iloc[0]:,}"}
    for kind in both.index:
        row, name = both.loc[kind], KINDS[kind]
        cells[name] = format_seconds(row["seconds"]) if given(row["seconds"]) else row["outcome"]
        cells[f"{name}: memory"] = format_bytes(row["extra_bytes"]) if given(row["extra_bytes"]) else MISSING
    return cells


def _lost(rows: pd.DataFrame) -> str:
    lost = rows[rows["outcome"] != "complete"]
    if not len(lost):
        return ""
    named = [f"{KINDS[row['attention']]} at {row['context_length']:,}" for row in lost.to_dict("records")]
    return f"Not measured ({join_words(sorted(set(lost['outcome'])))}): {join_words(named)}."


def _growth(rows: pd.DataFrame) -> str:
    """How the memory of the definition and of ours grows between the last two lengths that both have."""
    by_kind = {kind: rows[rows["attention"] == kind].dropna(subset="extra_bytes") for kind in ("plain", "flash")}
    shared = sorted(set.intersection(*(set(part["context_length"]) for part in by_kind.values())))
    if len(shared) < 2:
        return ""
    first, last = shared[-2], shared[-1]
    grown = {}
    for kind, part in by_kind.items():
        at = part.set_index("context_length")["extra_bytes"].astype(float)
        grown[kind] = (at[last] / at[first], at[last])
    words = {kind: f"{format_significant(factor, 2)} times" for kind, (factor, _) in grown.items()}
    ratio = grown["plain"][1] / grown["flash"][1]
    return (
        f"From {first:,} to {last:,} the definition's memory grows {words['plain']}, ours {words['flash']}: the score "
        f"matrix grows with the square of the length, what ours keeps with the length. At {last:,} ours takes "
        f"**{format_significant(ratio, 2)} times less**."
    )


def _against(rows: pd.DataFrame) -> str:
    """How fast ours is beside the others at the greatest length that it was measured at."""
    ours = rows[(rows["attention"] == "flash") & rows["seconds"].notna()]
    if not len(ours):
        return ""
    last = ours.loc[ours["context_length"].idxmax()]
    others = rows[(rows["context_length"] == last["context_length"]) & (rows["attention"] != "flash")]
    others = others.dropna(subset="seconds")
    told = [
        f"{format_significant(row['seconds'] / last['seconds'])} times as fast as {_name(row['attention'])}"
        for row in others.to_dict("records")
    ]
    if not told:
        return ""
    text = f"At {last['context_length']:,} ours is {join_words(told)}"
    if last["device"] == "CPU":
        text += (
            "; here it is the tiled explanation in PyTorch, which launches several operations for each tile: it shows "
            "the memory, and the kernels' speed is the GPU's matter"
        )
    return text + "."


def _name(kind: str) -> str:
    return {"plain": "the definition"}.get(kind, KINDS[kind])


def agreement_answer(table: pd.DataFrame, reason: str | None = None) -> str:
    """The errors of our kernels against float64 by kernel and precision, beside those of plain operations.

    `reason` says why nothing was interpreted, if nothing was.
    """
    rows = [_agreement_row(part) for _, part in table.groupby(["by", "kernel", "precision"], sort=False)]
    held, worse = int(table["holds"].sum()), table[table["error"] > 2 * table["plain_error"].clip(lower=1e-7)]
    text = f"**All {held} comparisons hold.**" if held == len(table) else f"**Only {held} of {len(table)} hold.**"
    text += (
        " Errors are those of output and gradients, the worst of them, relative in the l2 norm and against the "
        "definition in float64 on the same inputs; beside them, those of PyTorch's operations in the same precision."
    )
    shapes = list(dict.fromkeys(table.loc[table["kernel"] == "attention", "shape"]))
    if shapes:
        text += f" Attention's shapes (batch, heads, positions, head size) are {join_words(shapes)}."
    if len(worse):
        text += f" In {len(worse)} comparisons ours is more than twice as far off."
    else:
        text += " Nowhere is ours more than twice as far off as those."
    if table["by"].str.contains("twins").any():
        text += " Twins are the kernels' counterparts in plain PyTorch, which run where there is no GPU for Triton."
    if reason:
        text += f" The Triton code was not interpreted here: {reason}."
    shown = pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)
    return f"{shown}\n\n{text}"


def _agreement_row(rows: pd.DataFrame) -> dict[str, str]:
    first = rows.iloc[0]
    return {
        "by": first["by"].removeprefix("plain-PyTorch ").replace(" kernels", ""),
        "kernel": first["kernel"],
        "precision": first["precision"],
        "checks": f"{len(rows)}",
        "largest error": _small(rows["error"].max()),
        "plain operations": _small(rows["plain_error"].max()),
        "tolerance": scientific(first["tolerance"], 1),
        "holds": "yes" if rows["holds"].all() else "**no**",
    }


def _small(value: float) -> str:
    return "0" if value == 0 else scientific(value, 2)
