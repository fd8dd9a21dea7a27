"""What an allocation history says: what memory was for, its peaks, its course over time, the largest allocations."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from lmcore.profiling.memory.snapshot import NO_FRAME, UNKNOWN, Event, History

CATEGORIES = ("parameters", "optimizer state", "other", "gradients", "activations", "temporary")
"""What memory is for, from what always stands to what comes and goes (see `lmcore.profiling.memory.profile`)."""

TIMELINE_POINTS = 2_000
LARGEST = 25


def with_forward_stages(history: History) -> History:
    """The history with a stage "forward" before each backward pass, where the step does not name its own; of a step
    without stages with the one stage "step"."""
    if "forward" in history.stages:
        return history
    stages, reached = {}, 0
    for name, (first, last) in history.stages.items():
        if name.startswith("backward"):
            stages[name.replace("backward", "forward")] = (reached, first)
        stages[name], reached = (first, last), last
    return dataclasses.replace(history, stages=stages or {"step": (0, len(history.seconds) - 1)})


def explained(history: History, owners: Sequence[tuple[int, Mapping[int, Event]]]) -> History:
    """The history with category, stage and source of every allocation (see `profile_memory`).

    `owners` tells, for some states, which storages then are known, by address: such as parameters and gradients.
    """
    backward = [first for name, (first, _) in history.stages.items() if name.startswith("backward")]

    def explain(a: Any) -> tuple[str, str | None, str]:
        stage = history.stage_at(a.first)
        for state, known in owners:
            if a.first <= state < a.last and (owner := known.get(a.address)):
                return owner.category, stage, owner.source
        if a.first == 0:  # such as workspaces
            return "other", None, "there before, without a name" if a.source == NO_FRAME else a.source
        source = f"{stage or 'between stages'}, {NO_FRAME}" if a.source == NO_FRAME else a.source
        if str(stage).startswith(("forward", "loss")) and any(a.first <= first < a.last for first in backward):
            return "activations", stage, source
        again = str(stage).startswith("backward") and source.startswith("lmcore/") and "workload.py" not in source
        return "temporary", stage, f"{source}, computed again" if again else source

    told = [explain(a) for a in history.allocations.itertuples()]
    columns = pd.DataFrame(told, columns=["category", "stage", "source"], dtype=object)
    return dataclasses.replace(history, allocations=history.allocations.assign(**columns))


def levels(history: History) -> pd.DataFrame:
    """Bytes alive: a row for each state, a column for each category (where any is unknown, for those that occur)."""
    a, names = history.allocations, list(CATEGORIES)
    if UNKNOWN in (found := set(a["category"])):
        names = [name for name in (*CATEGORIES, UNKNOWN) if name in found]
    changes = np.zeros((len(history.seconds) + 1, len(names)), dtype=np.int64)
    column = pd.Categorical(a["category"], names).codes
    np.add.at(changes, (a["first"], column), a["bytes"])
    np.subtract.at(changes, (a["last"], column), a["bytes"])
    return pd.DataFrame(changes.cumsum(axis=0)[:-1], columns=names)


def summary(history: History) -> dict[str, Any]:
    """What an explained history says, in bytes and in states (state k is after k allocations and frees).

    "tool"; "truncated": the record was full and lost its beginning; "events": how many there are; "before_bytes",
    "peak_bytes", "after_bytes", and the same as {category: bytes} with "_by_category"; "most_by_category": each
    one's own peak; "peak_event" and "peak_stage": when the peak is; "categories"; "stages": name, first_event,
    last_event, start_bytes, end_bytes and peak_bytes of each; "timeline": {"event": […], "seconds": […], "bytes":
    {category: […]}}, where a value holds until the next one; "largest": the largest allocations of the record.
    """
    by_category, made = levels(history), history.allocations["first"] > 0
    total = by_category.sum(axis=1).to_numpy()
    peak, final = int(total.argmax()), len(total) - 1
    moments = {"before": 0, "peak": peak, "after": final}
    stages = [
        {
            "name": name,
            "first_event": first,
            "last_event": last,
            "start_bytes": int(total[first]),
            "end_bytes": int(total[last]),
            "peak_bytes": int(total[first : last + 1].max()),
        }
        for name, (first, last) in history.stages.items()
    ]
    return {
        "tool": history.tool,
        "truncated": history.truncated,
        "events": final,
        **{f"{when}_bytes": int(total[state]) for when, state in moments.items()},
        "peak_event": peak,
        "peak_stage": history.stage_at(peak),
        "categories": list(by_category),
        **{f"{when}_by_category": by_category.loc[state].to_dict() for when, state in moments.items()},
        "most_by_category": by_category.max().to_dict(),
        "stages": stages,
        "timeline": timeline(history, by_category),
        "largest": largest(history.allocations[made]),
    }


def timeline(history: History, by_category: pd.DataFrame) -> dict[str, Any]:
    """At most `TIMELINE_POINTS` states with the bytes of every category.

    The record is cut into equal runs of events, and of each the lowest and the highest total are kept: no peak is
    lost, and the picture has the outline of the whole. The first and last state and all stages' are kept as well.
    """
    total = by_category.sum(axis=1).to_numpy()
    kept = {0, int(total.argmax()), len(total) - 1}
    for first, last in history.stages.values():
        kept |= {first, last, first + int(total[first : last + 1].argmax())}
    runs = (TIMELINE_POINTS - len(kept)) // 2 if len(total) > TIMELINE_POINTS else len(total)
    for begin, end in pairwise(np.linspace(0, len(total), runs + 1, dtype=int).tolist()):
        kept |= {begin + int(total[begin:end].argmin()), begin + int(total[begin:end].argmax())}
    states = sorted(kept)
    return {
        "seconds": [float(history.seconds[state]) for state in states],
        "event": states,
        "bytes": by_category.loc[states].to_dict("list"),
    }


def largest(allocations: pd.DataFrame) -> list[dict[str, Any]]:
    """The largest allocations, those of one size, category, stage and source as one row with their `count`."""
    columns = ["bytes", "count", "category", "stage", "source"]
    keys = [name for name in columns if name != "count"]
    found = allocations.groupby(keys, dropna=False).size().rename("count").reset_index()
    found = found.sort_values(["bytes", "count"], ascending=False, kind="stable").head(LARGEST)[columns]
    return found.astype(object).where(found.notna(), None).to_dict("records")
