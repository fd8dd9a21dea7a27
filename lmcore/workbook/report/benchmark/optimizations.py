"""Sentences of notebook 04 on what gradient checkpointing and fused attention buy and cost."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmcore.profiling.cases import OPTIMIZATIONS, StudyConfig
from lmcore.profiling.memory.predicted import predicted_peak
from lmcore.workbook.report.answers import format_bytes, join_words
from lmcore.workbook.report.benchmark.published import PUBLISHED, is_published_setting
from lmcore.workbook.report.benchmark.study import NO_MEMORY, done, format_rate, has_memory
from lmcore.workbook.report.benchmark.views import markdown

NEAR = 0.05
"""Changes that are no further apart than this (five percentage points) count as the same finding."""


SAME_MEMORY = 0.01
"""Relative difference of peaks up to which they count as the same."""


@dataclass(frozen=True)
class CheckpointingCheck:
    """A training pass with checkpointing held against the same pass without."""

    every: int
    same_loss: bool
    same_gradients: int
    """Gradients that are bitwise equal, of so many:"""
    gradients: int
    forward_calls: int
    """Forward passes through blocks, of which there are `num_layers` without checkpointing."""
    num_layers: int

    @property
    def identical(self) -> bool:
        """Whether loss and all gradients are the same bits."""
        return self.same_loss and self.same_gradients == self.gradients > 0


def optimization_of(row: Mapping) -> str:
    """Name of the optimization that a row's switches are, as in `OPTIMIZATIONS`."""
    checkpointed, fused = not pd.isna(row["checkpoint_every"]), row["attention"] != "plain"
    wanted = ({"checkpoint_every": 1} if checkpointed else {}) | ({"attention": "sdpa"} if fused else {})
    return next(name for name, switches in OPTIMIZATIONS.items() if switches == wanted)


def optimizations_table(table: pd.DataFrame) -> pd.DataFrame:
    """The optimizations in order: name, outcome, tokens_per_second, peak_memory_bytes, and changes of both.

    Changes are relative to the baseline; None where it or the row has no number.
    """
    rows = table.assign(name=[optimization_of(row) for row in table.to_dict("records")]).set_index("name")
    rows = rows.loc[[name for name in OPTIMIZATIONS if name in rows.index]]
    columns = {"throughput": "tokens_per_second", "memory": "peak_memory_bytes"}
    result = rows[["outcome", *columns.values(), "device", "batch_size", "context_length", "precision"]].copy()
    for change, column in columns.items():
        values = result[column].astype(float).where(result["outcome"] == "complete")
        result[column] = values
        result[change] = values / values.get("baseline", np.nan) - 1
    return result.reset_index()


def optimizations_answer(table: pd.DataFrame, study: StudyConfig | None = None) -> str:
    """What checkpointing, fused attention and both buy and cost, beside the report's findings.

    With the `study` that made the cells, also why both together may save no more than checkpointing alone.
    """
    rows = optimizations_table(table)
    shown = markdown([_optimization_row(row) for row in rows.to_dict("records")])
    named = {row["name"]: row for row in rows.to_dict("records")}
    base = named.get("baseline")
    if base is None or base["outcome"] != "complete":
        fits = [name for name, row in named.items() if row["outcome"] == "complete"]
        why = "was not measured" if base is None else f"ended with: {base['outcome']}"
        tail = f" {join_words(fits).capitalize()} ran all the same." if fits else ""
        return f"{shown}\n\nThe baseline {why}, so there is nothing to compare with.{tail}"
    text = [
        f"On {base['device']} in {base['precision']}, at batch size {base['batch_size']:,} and context "
        f"{base['context_length']:,}:"
    ]
    same = is_published_setting(table, batch_size="optimization_batch", context_length="optimization_context")
    text += [_effect(row, PUBLISHED.get(name) if same else None) for name, row in named.items() if name != "baseline"]
    if not same:
        text.append(
            f"The report's numbers are those of {PUBLISHED['num_layers']} layers at batch size "
            f"{PUBLISHED['optimization_batch']:,} and context {PUBLISHED['optimization_context']:,}, and cannot be "
            "held against these."
        )
    if not has_memory(done(table)):
        text.append(NO_MEMORY)
    text.append(_lever(named))
    text.append(_no_more_saved(named, study))
    return f"{shown}\n\n{' '.join(part for part in text if part)}"


def _no_more_saved(named: Mapping[str, Mapping], study: StudyConfig | None) -> str:
    """Where the peak lies when fused attention saves nothing beside checkpointing: predicted from the shapes."""
    alone, both = (named.get(name, {}).get("peak_memory_bytes") for name in ("checkpointing", "both"))
    if study is None or pd.isna(alone) or pd.isna(both) or abs(both / alone - 1) > SAME_MEMORY:
        return ""
    row = named["both"]
    model = study.model(row["context_length"], **OPTIMIZATIONS["both"])
    peak = predicted_peak(model, row["batch_size"], precision=row["precision"], passes="train_step")
    return (
        f"Both together save no more memory than checkpointing alone: by the prediction from the shapes, the peak then "
        f"lies in the {peak['stage']} ({peak['moment']}), which fused attention does not touch."
    )


def _optimization_row(row: Mapping) -> dict[str, str]:
    known = row["outcome"] == "complete"
    published = PUBLISHED.get(row["name"], {})
    compared = row["name"] != "baseline"
    return {
        "": row["name"],
        "peak memory": format_bytes(row["peak_memory_bytes"]) if not pd.isna(row["peak_memory_bytes"]) else "",
        "change": _signed(row["memory"]) if compared else "",
        "tokens/s": format_rate(row["tokens_per_second"]) if known else row["outcome"],
        "change of tokens/s": _signed(row["throughput"]) if compared else "",
        "report: memory": _signed(published.get("memory")),
        "report: tokens/s": _signed(published.get("throughput")),
    }


def _effect(row: Mapping, published: Mapping | None) -> str:
    name = "Both together" if row["name"] == "both" else row["name"].capitalize()
    if row["outcome"] != "complete":
        return f"{name} was not measured ({row['outcome']})."
    verb = {"both": "change"}.get(row["name"], "changes")
    clauses = [] if pd.isna(row["memory"]) else [f"peak memory by **{_signed(row['memory'])}**"]
    clauses.append(f"tokens per second by **{_signed(row['throughput'])}**")
    text = f"{name} {verb} {' and '.join(clauses)}"
    if published is None:
        return text + "."
    verdicts = [
        f"{what} {_change_verdict(row[key], published[key])}"
        for key, what in (("memory", "memory"), ("throughput", "throughput"))
        if not pd.isna(row[key])
    ]
    return f"{text}; beside the report's numbers, {', '.join(verdicts)}."


def _change_verdict(ours: float, theirs: float) -> str:
    """Whether a change agrees with the report's, is in the same direction but of another size, or is opposite."""
    said = f"({_signed(theirs)} there)"
    if abs(ours - theirs) <= NEAR:
        return f"agrees {said}"
    if ours * theirs < 0:
        return f"goes the other way {said}"
    return f"changes {'more' if abs(ours) > abs(theirs) else 'less'} {said}"


def _lever(named: Mapping[str, Mapping]) -> str:
    """Which of the two saves more memory, and which is faster, if both are known."""
    one, two = named.get("checkpointing"), named.get("fused attention")
    if one is None or two is None or pd.isna(one["throughput"]) or pd.isna(two["throughput"]):
        return ""
    faster = "fused attention" if two["throughput"] > one["throughput"] else "checkpointing"
    if pd.isna(one["memory"]) or pd.isna(two["memory"]):
        return f"Of the two, {faster} is the faster."
    saver = "checkpointing" if one["memory"] < two["memory"] else "fused attention"
    both = f"Of the two, {saver} saves more memory and {faster} is the faster"
    if saver == faster:
        return f"{both}: here nothing speaks for the other alone."
    return f"{both}: the first is the lever for what does not fit, the second costs less time."


def checkpointing_answer(check: CheckpointingCheck) -> str:
    """Whether checkpointing changes the numbers, and that blocks were indeed computed again."""
    again = check.forward_calls - check.num_layers
    if check.identical:
        text = f"Loss and all {check.gradients} gradients are bitwise the same with checkpointing as without (CPU)"
    else:
        loss = "the same" if check.same_loss else "**another**"
        text = (
            f"With checkpointing the loss is {loss}, and **only {check.same_gradients} of {check.gradients}** "
            "gradients are bitwise the same as without (CPU)"
        )
    if again == 0:
        return f"{text}; but no block was computed a second time, so nothing was checkpointed."
    return (
        f"{text}, although {again} of {check.num_layers} blocks ran their forward pass a second time: it is the same "
        "computation on the same values, and buys memory with time alone."
    )


def _signed(change: float | None) -> str:
    return "" if change is None or pd.isna(change) else f"{100 * change:+.1f}%".replace("-", "−")
