"""Sentences of notebook 04 on components: FFN against attention (CSE599-O §5.3 (c)), and the roofline."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmcore.workbook.report.answers import format_percent, format_seconds, format_significant, join_words
from lmcore.workbook.report.benchmark.views import ALIKE, MISSING, given, rate, size_label

ATTENTION, FFN = "attention", "feed-forward network"
DIRECTIONS = ("forward", "forward + backward")

WELL_USED = 0.7
"""Share of the roof from which a component counts as near it."""


def ratio_table(components: pd.DataFrame) -> pd.DataFrame:
    """A row for each cell and direction: seconds of FFN and attention of a block, their ratio, and that of the FLOPs.

    Besides, for the forward pass, the share of each one's parts that is elementwise work, in time; the FLOP/s of their
    matrix products; and whether the host takes longer to launch the attention than the GPU to compute it.
    """
    rows = []
    for cell, parts in components.groupby("cell", sort=False):
        for direction in DIRECTIONS:
            at = parts[parts["direction"] == direction].set_index("component")
            if ATTENTION not in at.index or FFN not in at.index:
                continue
            attention, ffn = at.loc[ATTENTION], at.loc[FFN]
            head = {name: attention[name] for name in ("size", "context_length", "batch_size", "precision", "device")}
            row = {"cell": cell} | head | {"direction": direction}
            row |= {"attention": attention["seconds"], "ffn": ffn["seconds"]}
            row["measured"] = ffn["seconds"] / attention["seconds"]
            row["by_flops"] = ffn["flops"] / attention["flops"]
            for name, issued in (("attention", attention["issue_seconds"]), ("ffn", ffn["issue_seconds"])):
                own = parts[(parts["part_of"] == name) & (parts["kind"] != "whole")]
                row[f"{name}_issue"] = issued
                row[f"{name}_elementwise"] = _share(own, own["kind"] == "elementwise")
                products = own[own["kind"] == "matmul"]
                row[f"{name}_products"] = products["flops"].sum() / products["seconds"].sum() if len(own) else None
            rows.append(row)
    return pd.DataFrame(rows)


def _share(parts: pd.DataFrame, which: pd.Series) -> float | None:
    return parts.loc[which, "seconds"].sum() / parts["seconds"].sum() if len(parts) else None


def ffn_attention_answer(components: pd.DataFrame) -> str:
    """benchmarking_script (c) of CSE599-O: FFN against attention by time and by FLOPs, and why they differ."""
    rows = ratio_table(components)
    if not len(rows):
        return "No components were measured."
    several = {name for name in ("context_length", "precision") if rows[name].nunique() > 1}
    shown = pd.DataFrame([_ratio_row(row, several) for row in rows.to_dict("records")])
    sentences = [_verdict(rows[rows["direction"] == direction], direction) for direction in DIRECTIONS]
    sentences += [_why(rows[rows["direction"] == "forward"]), _launches(rows)]
    same = [f"{rows['precision'].iloc[0]}"] * ("precision" not in several)
    same += [f"context {rows['context_length'].iloc[0]:,}"] * ("context_length" not in several)
    same += [f"batch {rows['batch_size'].iloc[0]:,}", rows["device"].iloc[0]]
    head = f"Attention and FFN of one block ({', '.join(same)}):"
    text = shown.to_markdown(index=False, disable_numparse=True)
    return f"{head}\n\n{text}\n\n{' '.join(filter(None, sentences))}"


def _ratio_row(row: Mapping[str, Any], several: set[str]) -> dict[str, str]:
    settings = {name.partition("_")[0]: f"{row[name]}" for name in ("context_length", "precision") if name in several}
    return {
        "size": size_label(row),
        **settings,
        "passes": row["direction"],
        "attention": format_seconds(row["attention"]),
        "FFN": format_seconds(row["ffn"]),
        "FFN / attention": f"{row['measured']:.2f}",
        "by FLOPs": f"{row['by_flops']:.2f}",
    }


def _verdict(rows: pd.DataFrame, direction: str) -> str:
    if not len(rows):
        return ""
    off = (rows["measured"] / rows["by_flops"]).astype(float)
    words = "forward" if direction == "forward" else "forward and backward together"
    if (off - 1).abs().max() <= ALIKE:
        return f"Timed {words}, they do as the FLOPs say, within {format_percent((off - 1).abs().max(), 2)}."
    span = _range(off.min(), off.max())
    if off.max() < 1:
        return f"Timed {words}, the FFN takes **{span}** of what the FLOPs would give it beside the attention."
    if off.min() > 1:
        return f"Timed {words}, the FFN takes **{span} times** what the FLOPs would give it beside the attention."
    return f"Timed {words}, the ratio is between {span.replace(' to ', ' and ')} times that of the FLOPs."


def _why(rows: pd.DataFrame) -> str:
    """What the parts say: elementwise work, which has next to no FLOPs, and how fast each one's products are."""
    rows = rows[rows["attention_elementwise"].notna() & rows["ffn_elementwise"].notna()]
    if not len(rows):
        return ""
    attention, ffn = rows["attention_elementwise"].astype(float), rows["ffn_elementwise"].astype(float)
    text = (
        "Timed part by part, RoPE and the scaling, masking and softmax of the scores, of which the matmul FLOPs know "
        f"nothing, are {_percents(attention)} of the attention's time; SiLU and gate are {_percents(ffn)} of the FFN's."
    )
    speeds = (rows["ffn_products"] / rows["attention_products"]).astype(float)
    if (speeds - 1).abs().max() <= ALIKE:
        return f"{text} The matrix products of both run equally fast."
    text += f" The FFN's matrix products run **{_range(speeds.min(), speeds.max())} times** as fast as the attention's"
    if speeds.min() > 1:
        return f"{text}: they are larger, while scores and weighted sums are many small ones."
    return f"{text}."


def _launches(rows: pd.DataFrame) -> str:
    """Whether the host could not keep up: then a step of the model is slower than its components."""
    known = rows[rows["attention_issue"].notna() & (rows["direction"] == "forward")]
    if not len(known):
        return ""
    starved = known[known["attention_issue"] > known["attention"]]
    if not len(starved):
        return "The host launches the attention faster than the GPU computes it."
    clauses = []
    for precision in dict.fromkeys(known["precision"]):
        own = starved[starved["precision"] == precision]
        names = join_words(list(dict.fromkeys(f"`{size_label(row)}`" for row in own.to_dict("records"))))
        clauses.append(f"in {precision} {'for no size' if not len(own) else f'for {names}'}")
    worst = starved.loc[(starved["attention_issue"] / starved["attention"]).astype(float).idxmax()]
    return (
        "These are times of the GPU alone. The host needs longer to launch the attention than the GPU to compute it "
        f"{join_words(clauses)} (most so {format_seconds(worst['attention_issue'])} against "
        f"{format_seconds(worst['attention'])}, `{size_label(worst)}` in {worst['precision']}), so in an eager model "
        "of such blocks the launches may set the pace."
    )


def roofline_table(components: pd.DataFrame) -> str:
    """Every component of one cell as Markdown: intensity, achieved FLOP/s or bytes/s, and the share of its roof.

    All numbers are of one call; a step makes `times a step` of them: AdamW's is one block's parameters.
    """
    scale, unit = (1e12, "TFLOP/s") if components["flops_per_second"].max() >= 1e12 else (1e9, "GFLOP/s")
    shown = [
        {
            "component": row["component"],
            "passes": row["direction"],
            "times a step": f"{row['count']:,}",
            "time of one": format_seconds(row["seconds"]),
            "FLOPs / byte": format_significant(row["intensity"], 2),
            "bound by": row["bound"],
            unit: format_significant(row["flops_per_second"] / scale),
            "GB/s": format_significant(row["bytes_per_second"] / 1e9),
            "of the roof": format_percent(row["roofline_share"], 2),
        }
        for row in components.to_dict("records")
    ]
    return pd.DataFrame(shown).to_markdown(index=False, disable_numparse=True)


def roofline_answer(components: pd.DataFrame) -> str:
    """What the roofline says of one cell: its ridge, what lies left of it, what comes near its roof and what not."""
    if not len(components):
        return "No components were measured, so there is no roofline."
    first = components.iloc[0]
    peak, bandwidth = first["peak_flops_per_second"], first["peak_bytes_per_second"]
    parts = components[(components["kind"] != "whole")]
    memory, compute = (parts[parts["bound"] == bound] for bound in ("memory", "compute"))
    text = (
        f"On {first['device']} a large matrix product in {first['precision']} reaches **{rate(peak)}** and a large "
        f"copy **{format_significant(bandwidth / 1e9)} GB/s**: below {format_significant(peak / bandwidth, 2)} FLOPs "
        f"for each byte, the memory is the limit. In `{size_label(first)}` at context {first['context_length']:,} that "
        f"holds for {_named(memory)}; {_named(compute)} could reach the arithmetic's roof."
    )
    near, far = parts[parts["roofline_share"] >= WELL_USED], parts[parts["roofline_share"] < WELL_USED]
    if len(near):
        text += f" At {format_percent(WELL_USED)} of the roof or more: {_with_shares(near)}."
    if len(far):
        text += f" Farthest below it: {_with_shares(far.sort_values('roofline_share').head(3))}."
    slow = far[(far["kind"] == "elementwise")]
    if len(slow):
        text += (
            " An elementwise component is written as several operations here, each of which reads and writes all of "
            "its tensor, while the roof counts one reading and one writing: that is what fusing them could win back."
        )
    above = parts[parts["roofline_share"] > 1 + ALIKE]
    if len(above):
        text += f" Above it: {_with_shares(above)}, as caches are faster than the memory, which the copy measures."
    return text


def _named(parts: pd.DataFrame) -> str:
    return join_words(parts["component"].tolist()) or "none of the parts"


def _with_shares(parts: pd.DataFrame) -> str:
    rows = parts.to_dict("records")
    return join_words([f"{row['component']} ({format_percent(row['roofline_share'], 2)})" for row in rows])


def _percents(shares: pd.Series) -> str:
    low, high = format_percent(shares.min(), 2), format_percent(shares.max(), 2)
    return low if low == high else f"{low} to {high}"


def _range(low: float, high: float) -> str:
    low_text, high_text = f"{low:.2f}", f"{high:.2f}"
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def forward_sum(components: pd.DataFrame, forward_seconds: float | None) -> str:
    """How much of a measured forward pass the components' own times, each as often as it occurs, add up to."""
    parts = components[(components["direction"] == "forward") & (components["kind"] != "whole")]
    parts = parts[parts["component"] != "cross-entropy"]
    if not len(parts) or not given(forward_seconds):
        return MISSING
    total = (parts["seconds"] * parts["count"]).sum()
    text = (
        f"Added up over the model, the components take {format_seconds(total)}, "
        f"{format_percent(total / forward_seconds, 2)} of the {format_seconds(forward_seconds)} of a forward pass"
    )
    if total < (1 - ALIKE) * forward_seconds:
        return f"{text}: the rest is waiting between them, and work that was not timed alone, as copies are."
    if total > (1 + ALIKE) * forward_seconds:
        return f"{text}: in the model, inputs still lie in the cache from the operation before."
    return f"{text}."
