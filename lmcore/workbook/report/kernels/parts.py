"""Sentences of notebook 07 on the parts of a step beside attention: loss, optimizer, elementwise work; and decoding."""

import pandas as pd

from lmcore.profiling.kernels.optimizer import ONE_PASS, ONE_PASS_MIXED
from lmcore.workbook.report.answers import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    format_significant,
    join_words,
)
from lmcore.workbook.report.benchmark.views import MISSING, given

NAMES = {"plain": "operation by operation", "compiled": "torch.compile", "fused": "ours"}
"""Variants of `lmcore.profiling.kernels.cases.variant_cases`, for readers."""


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows as a Markdown table, as they are."""
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def loss_answer(table: pd.DataFrame) -> str:
    """Time and memory of head and loss of each variant, and what the logits have to do with it."""
    if not len(table):
        return "No loss was measured."
    first = table.iloc[0]
    rows = [
        {
            "head and loss, both passes": NAMES[row["variant"]],
            "median time": format_seconds(row["seconds"]) if given(row["seconds"]) else row["outcome"],
            "memory": format_bytes(row["extra_bytes"]) if given(row["extra_bytes"]) else MISSING,
        }
        for row in table.to_dict("records")
    ]
    text = (
        f"{first['rows']:,} positions over a vocabulary of {first['vocab_size']:,} are "
        f"{format_bytes(first['logits_bytes'])} of logits in "
        f"{first['precision']}; the gradients that must come out, of the activations and of the head, are "
        f"{format_bytes(first['gradient_bytes'])}."
    )
    by = table.set_index("variant")
    if {"plain", "fused"} <= set(by.index):
        plain, fused = by.loc["plain"], by.loc["fused"]
        if given(plain["extra_bytes"]) and given(fused["extra_bytes"]):
            logits = plain["extra_bytes"] / plain["logits_bytes"]
            text += (
                f" Operation by operation the loss needs the room of {format_significant(logits, 2)} logit matrices; "
                f"ours, which takes {_chunk(fused['chunk_rows'])} at a time and turns their logits into "
                f"gradients at once, **{format_significant(plain['extra_bytes'] / fused['extra_bytes'], 2)} times "
                "less**"
            )
            text += "." if not given(plain["seconds"]) else f", in {_times(plain['seconds'], fused['seconds'])}."
        elif given(plain["seconds"]) and given(fused["seconds"]):
            text += f" Ours takes {_times(plain['seconds'], fused['seconds'])}."
    return f"On {first['device']}:\n\n{markdown(rows)}\n\n{text}"


def _chunk(rows: float | None) -> str:
    return f"{rows:,.0f} rows" if given(rows) else "a chunk of rows"


def _times(before: float, after: float) -> str:
    return f"{format_significant(after / before, 2)} times the time"


def optimizer_answer(table: pd.DataFrame) -> str:
    """Bytes that each way to clip and update moves for a parameter, as counted, and how fast it moves them here."""
    if not len(table):
        return "No optimizer was measured."
    first = table.iloc[0]
    rows = [
        {
            "clipping and AdamW": row["contestant"],
            "bytes per parameter": f"{row['bytes_per_parameter']:g}",
            "median time": format_seconds(row["seconds"]) if given(row["seconds"]) else f"absent ({row['reason']})",
            "bytes per second": f"{format_significant(row['bytes_per_second'] / 1e9)} GB/s"
            if given(row["bytes_per_second"])
            else MISSING,
            "of a large copy": format_percent(row["bytes_per_second"] / row["copy_bytes_per_second"], 2)
            if given(row["bytes_per_second"])
            else MISSING,
        }
        for row in table.to_dict("records")
    ]
    floor = ONE_PASS * first["parameters"] / first["copy_bytes_per_second"]
    plain = table[table["contestant"].str.startswith("plain")].iloc[0]
    text = (
        f"On {first['device']}, {format_count(first['parameters'])} float32 parameters:\n\n{markdown(rows)}\n\n"
        f"Operation by operation, {plain['bytes_per_parameter']:g} bytes move for each parameter, since every one of "
        f"them reads and writes whole tensors. The update itself needs 28: weight, gradient and both moments in, "
        f"weight and moments out; clipping needs the gradients' norm first, 4 more: **{ONE_PASS}**. With bfloat16 "
        f"gradients and a bfloat16 copy of the weights for the next forward pass it is {ONE_PASS_MIXED}, and the casts "
        f"of autocast, 6 bytes for each weight, are gone. At the speed of a large copy, {ONE_PASS} bytes take "
        f"{format_seconds(floor)} here."
    )
    cached = table["bytes_per_second"] > 1.05 * table["copy_bytes_per_second"]
    if cached.any():
        text += (
            " Where it is above 100%, a part stays in the cache, or more is read than written, of which a copy does as "
            "much of the one as of the other."
        )
    return f"{text} {_fastest(table)}".strip()


def _fastest(table: pd.DataFrame) -> str:
    done = table.dropna(subset="seconds")
    plain, ours = (done[done["contestant"].str.startswith(name)] for name in ("plain", "ours"))
    if not len(plain) or not len(ours):
        return ""
    text = (
        f"Ours takes {format_significant(ours['seconds'].iloc[0] / plain['seconds'].iloc[0], 2)} times the time of the "
        "plain one"
    )
    if "plain operations" in ours["contestant"].iloc[0]:
        text += "; without Triton it is plain operations, too, and gains nothing of note"
    return text + "."


def elementwise_answer(table: pd.DataFrame) -> str:
    """Time of each operation by variant, the bytes that the definition moves and the least, and why it matters."""
    if not len(table):
        return "No elementwise operation was measured."
    first, rows = table.iloc[0], []
    for name, part in table.groupby("operation", sort=False):
        by = part.set_index("variant")
        row = {"operation, both passes": name}
        row |= {NAMES[variant]: format_seconds(by.loc[variant, "seconds"]) for variant in by.index}
        row["definition moves"] = format_bytes(by["eager_bytes"].iloc[0])
        row["least"] = format_bytes(by["least_bytes"].iloc[0])
        rows.append(row)
    plain = table[table["variant"] == "plain"].drop_duplicates("operation")
    ratios = (plain["eager_bytes"] / plain["least_bytes"]).astype(float)
    text = (
        f"On {first['device']} in {first['precision']}:\n\n{markdown(rows)}\n\n"
        f"Operation by operation the definitions move {format_significant(ratios.min(), 2)} to "
        f"{format_significant(ratios.max(), 2)} times what has to move"
    )
    return f"{text}, and nothing of that is arithmetic. {_elementwise_verdict(table)}".strip()


def _elementwise_verdict(table: pd.DataFrame) -> str:
    by = table.pivot_table(index="operation", columns="variant", values="seconds", sort=False)
    told = []
    for other in ("plain", "compiled"):
        if other in by and "fused" in by:
            ratios = by[other] / by["fused"]
            low, high = format_significant(ratios.min(), 2), format_significant(ratios.max(), 2)
            told.append(f"{low if low == high else f'{low} to {high}'} times as fast as {NAMES[other]}")
    text = f"Ours are {join_words(told)}." if told else ""
    if len(table) and table["device"].iloc[0] == "CPU":
        text += " On a CPU they are the same operations written in another way."
    return text


def decoding_answer(table: pd.DataFrame) -> str:
    """Tokens per second of each way to decode, and the most that reading the weights once a token would allow."""
    if not len(table):
        return "Nothing was decoded."
    first, rows = table.iloc[0], []
    words = {"plain": "the whole window again", "cached": "KV cache", "fused": "our kernels"}
    for batch, part in table.groupby("batch_size"):
        by = part.set_index("way")
        row = {"prompts": f"{batch:,}"}
        row |= {words[way]: f"{_rate(by.loc[way, 'tokens_per_second'])}" for way in by.index}
        rows.append(row | {"bound": _rate(by["bound"].iloc[0])})
    text = (
        f"Tokens per second on {first['device']}, size `{first['size']}` in {first['precision']}, a context of "
        f"{first['context_length']:,}; the bound is that of reading all weights but the embeddings once for each "
        f"step, at the speed of a copy:\n\n{markdown(rows)}\n\n"
    )
    single = table[table["batch_size"] == table["batch_size"].min()].set_index("way")
    told = []
    if {"plain", "cached"} <= set(single.index):
        told.append(f"The cache decodes {_ratio(single, 'cached', 'plain')} times as fast as the window")
    if {"cached", "fused"} <= set(single.index):
        told.append(f"our kernels {_ratio(single, 'fused', 'cached')} times as fast as the cache")
        share = single.loc["fused", "tokens_per_second"] / single.loc["fused", "bound"]
        told.append(f"and reach {format_percent(share, 2)} of the bound")
        if first["device"] == "CPU" and share < 0.5:
            told[-1] += (
                "; a CPU runs the kernels' plain twins, and starting operations takes longer than reading weights"
            )
    return text + (", ".join(told) + f". {_same(table)}" if told else _same(table))


def _rate(value: float) -> str:
    return format_count(float(f"{value:.3g}"))


def _ratio(rows: pd.DataFrame, one: str, other: str) -> str:
    return format_significant(rows.loc[one, "tokens_per_second"] / rows.loc[other, "tokens_per_second"], 2)


def _same(table: pd.DataFrame) -> str:
    """Whether all ways decode the same tokens; random weights make near ties, where rounding decides."""
    least = table["same_tokens"].min()
    if least == 1:
        return "All ways decode the same tokens."
    return (
        f"At least {format_percent(least, 2)} of the tokens are the same: random weights make near ties, which "
        "rounding decides, and all that follows is then another text."
    )
