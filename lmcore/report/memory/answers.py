"""Sentences of notebook 06 on timelines and peaks: what the tables say, whatever the machine, sizes and outcome."""

from collections.abc import Mapping

import pandas as pd

from lmcore.report.answers import format_bytes, format_percent, format_significant, join_words
from lmcore.report.memory.figures import PASSES

VISIBLE = 0.05
"""Change of the level, as a share of the peak, below which a stage cannot be told from the timeline."""

NOTICEABLE = 0.1
"""Change of a peak that counts as one."""

BASELINE = "fp32"
"""The precision that others are held against."""

HALF = ("bf16", "fp16")

PLURALS = {"temporary": "temporaries", "other": "other tensors"}

NO_CELL = "No cell was completed, so there is nothing to report."


def timeline_answer(stages: pd.DataFrame) -> str:
    """memory_profiling (a): what the timelines look like, and whether the stages can be told from their peaks."""
    if not len(stages):
        return NO_CELL
    parts = [_timeline_sentences(rows) for _, rows in stages.groupby("cell", sort=False)]
    return "\n\n".join(parts)


def _timeline_sentences(stages: pd.DataFrame) -> str:
    first = stages.iloc[0]
    head = f"**{_model(first)}, {PASSES[first['passes']]} in {first['precision']}.**"
    if first["passes"] == "forward":
        return f"{head} {_inference_sentences(first)}"
    by_name = {row["stage"]: row for row in stages.to_dict("records")}
    peak = stages["peak_bytes"].max()
    told = {name: abs(row["end_bytes"] - row["start_bytes"]) >= VISIBLE * peak for name, row in by_name.items()}
    course = [_climb(by_name["forward"]), _turn(stages), _fall(by_name["backward"]), _update(by_name)]
    text = " ".join(filter(None, course))
    slopes = [name for name in ("forward", "backward") if told[name]]
    if len(slopes) == 2:
        verdict = "So the stages can be told apart by their slopes, and the peak lies where they meet."
        if not _between_slopes(stages):
            verdict = "So forward and backward pass can be told by their slopes, although the peak is not between them."
    elif slopes:
        verdict = f"Of the stages, only the {slopes[0]} pass changes the level enough to be told from it."
    else:
        verdict = (
            f"No stage changes the level by {format_percent(VISIBLE, 1)} of the peak, as what is always there "
            "outweighs the rest: the stages can hardly be told from the height, only from what comes and goes on top."
        )
    return f"{head} {text} {verdict}"


def _inference_sentences(row: Mapping) -> str:
    above = row["peak_bytes"] - row["start parameters"]
    share = row["start parameters"] / row["peak_bytes"]
    over = row["end_bytes"] - row["start_bytes"]
    last = pd.notna(row["peak_position"]) and row["peak_position"] > 0.9
    highest = "the highest at the very end, where the logits are made" if last else "the highest on the way"
    text = (
        f"The parameters, {format_bytes(row['start parameters'])} or {format_percent(share, 2)} of the peak of "
        f"{format_bytes(row['peak_bytes'])}, are a flat base. On it stand teeth, block after block, {highest}, up to "
        f"{format_bytes(above)}: without a backward pass to come, each tensor is freed after its last use."
    )
    return f"{text} At the end, {format_bytes(max(over, 0))} more are there than at the beginning: the logits."


def _climb(forward: Mapping) -> str:
    made = forward["end activations"] - forward["start activations"]
    always = forward["start_bytes"]
    return (
        f"The step begins at {format_bytes(always)}, of which parameters and optimizer state are "
        f"{format_bytes(forward['start parameters'] + forward['start optimizer state'])}; in the forward pass "
        f"activations pile up block by block to {format_bytes(made)}."
    )


def _turn(stages: pd.DataFrame) -> str:
    peak = stages.loc[stages["peak_bytes"].idxmax()]
    where = {"loss": "in the loss", "optimizer": "in the optimizer's step"}.get(
        peak["stage"], f"in the {peak['stage']} pass"
    )
    return f"The peak of {format_bytes(peak['peak_bytes'])} is {where}."


def _fall(backward: Mapping) -> str:
    freed = backward["start activations"] - backward["end activations"]
    made = backward["end gradients"] - backward["start gradients"]
    change = backward["end_bytes"] - backward["start_bytes"]
    direction = "falls" if change < 0 else "climbs"
    why = "more than is allocated" if change < 0 else "less than is allocated"
    return (
        f"In the backward pass the activations are freed from the last block to the first ({format_bytes(freed)}), "
        f"{why} for gradients ({format_bytes(made)}), so the level {direction} by {format_bytes(abs(change))}."
    )


def _update(by_name: Mapping[str, Mapping]) -> str:
    if "optimizer" not in by_name:
        return ""
    row = by_name["optimizer"]
    extra = row["peak_bytes"] - row["start_bytes"]
    if extra < VISIBLE * max(other["peak_bytes"] for other in by_name.values()):
        return f"The optimizer works in place: its temporaries add at most {format_bytes(extra)} to a flat line."
    return f"The optimizer's temporaries add up to {format_bytes(extra)}."


def _between_slopes(stages: pd.DataFrame) -> bool:
    """Whether the peak is near the end of the forward pass, in the loss or near the beginning of the backward pass."""
    positions = stages.set_index("stage")["peak_position"].dropna()
    near = {"forward": lambda at: at > 0.85, "loss": lambda at: True, "backward": lambda at: at < 0.15}
    return any(name in near and near[name](at) for name, at in positions.items())


def peaks_answer(peaks: pd.DataFrame, precision: str = BASELINE) -> str:
    """memory_profiling (b): peak of a forward pass and of a training step by size and context, in one precision."""
    rows = peaks[(peaks["precision"] == precision) & _plain(peaks)]
    if not len(rows):
        return f"No cell in {precision} was measured."
    kinds = [passes for passes in PASSES if passes in set(rows["passes"])]
    lines = []
    for (size, context), part in rows.groupby(["size", "context_length"], sort=False):
        cells = part.set_index("passes")
        levels = {PASSES[kind]: peak_words(cells.loc[kind]) if kind in cells.index else "–" for kind in kinds}
        lines.append({"size": size, "context": f"{context:,}"} | levels)
    table = pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)
    growth = " ".join(_growth(part) for _, part in rows.groupby("size", sort=False))
    notes = " ".join(filter(None, [growth, _reserved(rows), lost_sentence(rows)]))
    return f"Peak of what tensors take, in {precision}:\n\n{table}\n\n{notes}".rstrip()


def _reserved(rows: pd.DataFrame) -> str:
    """How much more the caching allocator took from the device; empty where that is not known."""
    known = rows.dropna(subset=["peak_bytes", "reserved_peak_bytes"])
    if not len(known):
        return ""
    ratios = known["reserved_peak_bytes"].astype(float) / known["peak_bytes"].astype(float)
    worst = known.loc[ratios.idxmax()]
    return (
        f"The allocator keeps what it has once taken from the device, so that nvidia-smi shows more: at most "
        f"{format_significant(ratios.max(), 3)} times as much, {format_bytes(worst['reserved_peak_bytes'])} for "
        f"`{worst['cell']}`."
    )


def _growth(rows: pd.DataFrame) -> str:
    """By how much the peaks of one size grow from its shortest to its longest context."""
    clauses = []
    for passes, part in rows[rows["outcome"] == "complete"].groupby("passes", sort=False):
        part = part.sort_values("context_length")
        first, last = part.iloc[0], part.iloc[-1]
        if first["context_length"] < last["context_length"]:
            ratio = format_significant(last["peak_bytes"] / first["peak_bytes"], 3)
            clauses.append(f"a {PASSES[passes]} {ratio} times")
            span = f"from context {first['context_length']:,} to {last['context_length']:,}"
    return f"Size {rows.iloc[0]['size']} takes, {span}, {join_words(clauses)} the memory." if clauses else ""


def lost_sentence(rows: pd.DataFrame) -> str:
    """Names the cells that did not fit, and those that failed otherwise; empty without any."""
    text = ""
    lost = rows[rows["outcome"] == "out of memory"]
    if len(lost):
        cells = join_words([f"`{cell}`" for cell in lost["cell"]])
        asked = "; ".join(dict.fromkeys(str(reason) for reason in lost["reason"].dropna()))
        text = f"**Out of memory** on {lost.iloc[0]['device']}: {cells} ({asked})."
    failed = rows[~rows["outcome"].isin(["complete", "out of memory"])]
    if len(failed):
        text += f" Failed: {join_words([f'`{cell}`' for cell in failed['cell']])}."
    return text.strip()


def peak_words(row: Mapping) -> str:
    """The peak of a cell, or how else it ended."""
    return format_bytes(row["peak_bytes"]) if row["outcome"] == "complete" else f"**{row['outcome']}**"


def _plain(table: pd.DataFrame) -> pd.Series:
    """Rows of the model as it is defined: no fused attention, no checkpointing."""
    return (table["attention"] == "plain") & table["checkpoint_every"].isna()


def precision_answer(peaks: pd.DataFrame, composition: pd.DataFrame) -> str:
    """memory_profiling (c): peaks in mixed precision against float32, and why."""
    rows = peaks[_plain(peaks)]
    mixed = [name for name in HALF if name in set(rows["precision"])]
    if not mixed or BASELINE not in set(rows["precision"]):
        return f"Only {join_words(list(dict.fromkeys(rows['precision'])))} was measured, so nothing can be compared."
    pairs = precision_pairs(rows, mixed[0])
    table = _pairs_markdown(pairs, mixed[0])
    verdicts = [_verdict(pairs, passes, mixed[0]) for passes in PASSES if passes in set(pairs["passes"])]
    text = f"{table}\n\n{' '.join(filter(None, verdicts))}"
    why = _why(composition[_plain(composition)], mixed[0])
    return " ".join([text, why, lost_sentence(rows[rows["precision"].isin([BASELINE, mixed[0]])])]).strip()


def precision_pairs(rows: pd.DataFrame, mixed: str) -> pd.DataFrame:
    """A row for each cell of the baseline that was also measured in `mixed`; `ratio` is missing where one is."""
    keys = ["size", "context_length", "passes"]
    columns = [*keys, "outcome", "peak_bytes"]
    parts = [rows.loc[rows["precision"] == precision, columns] for precision in (BASELINE, mixed)]
    pairs = parts[0].merge(parts[1], on=keys, suffixes=("", "_mixed"))
    return pairs.assign(ratio=pairs["peak_bytes_mixed"].astype(float) / pairs["peak_bytes"].astype(float))


def _pairs_markdown(pairs: pd.DataFrame, mixed: str) -> str:
    rows = [
        {
            "size": row["size"],
            "context": f"{row['context_length']:,}",
            "passes": PASSES[row["passes"]],
            BASELINE: peak_words(row),
            mixed: peak_words({"peak_bytes": row["peak_bytes_mixed"], "outcome": row["outcome_mixed"]}),
            f"{mixed} / {BASELINE}": "–" if pd.isna(row["ratio"]) else format_significant(row["ratio"], 3),
        }
        for row in pairs.to_dict("records")
    ]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def _verdict(pairs: pd.DataFrame, passes: str, mixed: str) -> str:
    ratios = pairs.loc[pairs["passes"] == passes, "ratio"].dropna()
    if not len(ratios):
        return ""
    low, high = ratios.min(), ratios.max()
    spread = format_significant(low, 3)
    if format_significant(high, 3) != spread:
        spread = f"{spread} to {format_significant(high, 3)}"
    if high <= 1 - NOTICEABLE:
        judged = "**less memory** throughout"
    elif low >= 1 + NOTICEABLE:
        judged = "**more memory** throughout"
    elif low > 1 - NOTICEABLE and high < 1 + NOTICEABLE:
        judged = "**hardly any difference**"
    else:
        judged = "a difference that depends on size and context"
    return f"For a {PASSES[passes]}, {mixed} means {judged}: {spread} times the peak in {BASELINE}."


def _why(composition: pd.DataFrame, mixed: str) -> str:
    """From the make-up of the peaks of one cell in both precisions."""
    keys = ["size", "context_length", "passes"]
    both = composition[composition["precision"].isin([BASELINE, mixed])]
    sentences = []
    for (size, context, passes), part in both.groupby(keys, sort=False):
        table = part.pivot_table(index="category", columns="precision", values="bytes", aggfunc="first")
        if {BASELINE, mixed} <= set(table.columns):
            where = f"In the {PASSES[passes]} of {size} at context {context:,}"
            sentences.append(f"{where}, {_changes(table[BASELINE], table[mixed], mixed)}.")
    if not sentences:
        return ""
    return (
        f"Autocast keeps weights, gradients and AdamW's moments in float32 and adds {mixed} copies of weights for "
        "the matrix products; only the activations that these products take and make become half as large. "
        f"{' '.join(sentences)}"
    )


def _changes(before: pd.Series, after: pd.Series, mixed: str) -> str:
    total = max(before.sum(), after.sum())
    weights = [name for name in ("parameters", "optimizer state", "gradients") if before[name] or after[name]]
    same = [name for name in weights if abs(after[name] - before[name]) < 0.01 * total]
    share = before[same].sum() / before.sum()
    text = f"{join_words(same)} make {format_percent(share, 2)} of the peak in float32 and stay" if same else ""
    moved = [
        f"{PLURALS.get(name, name)} go from {format_bytes(before[name])} to {format_bytes(after[name])}"
        for name in before.index
        if name not in same and abs(after[name] - before[name]) >= 0.01 * total
    ]
    return ", while ".join(filter(None, [text, join_words(moved)]))


def device_note(stages: pd.DataFrame) -> str:
    """What was measured, and with what; on a machine without CUDA, that it was the CPU's allocator."""
    if not len(stages):
        return NO_CELL
    tools, devices = (list(dict.fromkeys(stages[key])) for key in ("tool", "device"))
    sizes = list(dict.fromkeys(stages["size"]))
    text = f"Recorded by {join_words(tools)} on {join_words(devices)}; timelines of size {join_words(sizes)}."
    full = list(dict.fromkeys(stages.loc[stages["truncated"].astype(bool), "cell"]))
    if full:
        text += f" The record of {join_words([f'`{cell}`' for cell in full])} was full, and its beginning is lost."
    if any("CPU" in tool for tool in tools):
        return (
            f"{text} This machine has no CUDA GPU, so the allocator of the **CPU** was measured, on a small model. "
            "The timelines have the form that they have on a GPU; their sizes say nothing about it."
        )
    return text


def _model(row: Mapping) -> str:
    return f"Size {row['size']}, context {row['context_length']:,}"
