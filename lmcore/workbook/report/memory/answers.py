"""Sentences of notebook 06 on timelines: what the tables say, whatever the machine, sizes and outcome."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from lmcore.workbook.report.answers import format_bytes, format_percent, join_words
from lmcore.workbook.report.memory.figures import PASSES

VISIBLE = 0.05
"""Change of the level, as a share of the peak, below which a stage cannot be told from the timeline."""

BASELINE = "fp32"
"""The precision that others are held against."""

NO_CELL = "No cell was completed, so there is nothing to report."


def timeline_answer(stages: pd.DataFrame) -> str:
    """memory_profiling (a): what the timelines look like, and whether the stages can be told from their peaks."""
    if not len(stages):
        return NO_CELL
    cells = [rows for _, rows in stages.groupby("cell", sort=False)]
    return "\n\n".join([_timeline_summary(cells), *(_timeline_sentences(rows) for rows in cells)])


def _timeline_summary(cells: Sequence[pd.DataFrame]) -> str:
    """Inference and training in a sentence each."""
    sentences = []
    inference = [rows.iloc[0] for rows in cells if rows.iloc[0]["passes"] == "forward"]
    if inference:
        shares = [row["start parameters"] / row["peak_bytes"] for row in inference]
        share = span_words(min(shares), max(shares), lambda value: format_percent(value, 2))
        sentences.append(f"Inference is a flat line with teeth: the parameters make **{share}** of its peak.")
    verdicts: dict[str, list[str]] = {}
    for rows in cells:
        if rows.iloc[0]["passes"] != "forward":
            verdicts.setdefault(_readable(rows), []).append(rows.iloc[0]["size"])
    for verdict, sizes in verdicts.items():
        sizes = list(dict.fromkeys(sizes))
        of = f"of size{'s' * (len(sizes) > 1)} {join_words(sizes)}"
        sentences.append(f"In training {of}, {verdict}.")
    return " ".join(sentences)


def span_words(low: float, high: float, words: Callable[[float], str]) -> str:
    """Two values as "1 to 2", or as one where they read alike."""
    return words(low) if words(low) == words(high) else f"{words(low)} to {words(high)}"


def _slopes(stages: pd.DataFrame) -> list[str]:
    """Which of forward and backward pass changes the level enough to be seen."""
    by_name = stages.set_index("stage")
    change = (by_name["end_bytes"] - by_name["start_bytes"]).abs()
    return [name for name in ("forward", "backward") if change[name] >= VISIBLE * stages["peak_bytes"].max()]


def _readable(stages: pd.DataFrame) -> str:
    """Whether the stages can be told from the timeline of a step, as a clause."""
    slopes = _slopes(stages)
    if len(slopes) == 2:
        if _between_slopes(stages):
            return "the stages can be told by their slopes, **and the peak lies where they meet**"
        return "forward and backward pass can be told by their slopes, **although the peak is not between them**"
    if slopes:
        return f"**only the {slopes[0]} pass** changes the level enough to be told from it"
    return (
        f"no stage changes the level by {format_percent(VISIBLE, 1)} of the peak, as what is always there "
        "outweighs the rest: **the stages can hardly be told** from the height, only from what comes and goes on top"
    )


def _timeline_sentences(stages: pd.DataFrame) -> str:
    first = stages.iloc[0]
    head = f"**{_model(first)}, {PASSES[first['passes']]} in {first['precision']}.**"
    if first["passes"] == "forward":
        return f"{head} {_inference_sentences(first)}"
    by_name = {row["stage"]: row for row in stages.to_dict("records")}
    course = [_climb(by_name["forward"]), _turn(stages), _fall(by_name["backward"]), _update(by_name)]
    return " ".join(filter(None, [head, *course]))


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
        f"activations pile up block by block, by {format_bytes(made)}."
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
